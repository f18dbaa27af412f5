"""Random operations of a ledger on models whose state cannot be cut: after each, the next token of
a slot has the logits of a fresh context.
"""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding.contexts.context import Aborted, Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.kv_cache import offload, offload_store
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.ledger import Ledger
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.quant import families, tiny_gguf

CELLS, BATCH, SLOTS, N_VOCAB = 256, 32, 4, 200
MAX_DIFFERENCE = 1e-3  # of a logit, between passes of different shapes in float32
N_OPERATIONS = 120


@pytest.fixture(scope="module", params=["mamba", "Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "gemma3"])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledger")
    out = folder / "m.gguf"
    if request.param == "mamba":
        return tiny_gguf.mamba(out)
    if request.param == "gemma3":
        return tiny_gguf.gemma3(out)
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    case = next(case for case in families.cases() if case.hf == request.param)
    families.build(case, folder / "tiny")
    source = checkpoint_source.open_checkpoint(folder / "tiny")
    write.write_model(plan.plan_quantization(source, "F32"), out, threads=1)
    return out


class Play:
    """Answers to prompts with common beginnings, each in its own slot, and their states."""

    def __init__(self, context: Context, fresh: Context, seed: int) -> None:
        self.context, self.fresh, self.rng = context, fresh, random.Random(seed)
        self.ledger = Ledger(context)
        self.store = offload_store.OffloadStore(self.ledger)
        self.idle = offload.IdleOffload(self.store)
        self.swap = offload.PreemptionSwap(self.store)
        self.store.set_budget(self.rng.choice([0, 200_000, 1 << 30]))
        self.swapped: list[SwappedState] = []
        self.texts: list[list[int]] = [self.words(40)]
        self.n_reused = 0

    def words(self, most: int) -> list[int]:
        return self.rng.choices(range(3, N_VOCAB), k=self.rng.randint(1, most))

    def compute(self, slot: int, tokens: list[int]) -> None:
        """Add tokens to a slot, and compare the logits of the last one."""
        for at in range(0, len(tokens), BATCH):
            piece, start = tokens[at : at + BATCH], len(self.ledger.tokens[slot])
            rows = self.context.decode(rows_of(slot, start, piece))
            self.ledger.append(slot, piece)
        expected = fresh_logits(self.fresh, self.ledger.tokens[slot])
        assert np.abs(rows[0].logits - expected).max() < MAX_DIFFERENCE

    def answer(self) -> None:
        text = self.rng.choice(self.texts)
        prompt = [*text[: self.rng.randint(1, len(text))], *self.words(20)][: CELLS // 2]
        self.idle.restore_prefix(prompt, "")
        if not self.ledger.n_idle or not self.ledger.make_room(len(prompt)):
            return
        claimed = self.ledger.claim_slot_for(prompt)
        assert claimed is not None
        slot, reused = claimed
        self.n_reused += reused
        if reused < len(prompt) - 1:
            self.compute(slot, prompt[reused:-1])
            self.ledger.take_checkpoint(slot)
        self.compute(slot, prompt[-1:])
        self.texts.append(prompt)

    def busy_slot(self, n_cells: int = 0) -> int | None:
        slots = self.ledger.busy_slots
        return self.rng.choice(slots) if slots and self.ledger.make_room(n_cells) else None

    def extend(self) -> None:
        if (slot := self.busy_slot(8)) is not None:
            self.compute(slot, self.words(8))

    def draft(self) -> None:
        """Compute a token and the guesses that follow it, and drop the wrong ones."""
        if (slot := self.busy_slot(8)) is None:
            return
        length, guesses = len(self.ledger.tokens[slot]), self.words(6)
        can_return = self.ledger.can_return(slot, len(guesses)) or self.ledger.take_checkpoint(slot)
        n_right = self.rng.randrange(len(guesses))
        self.compute(slot, [5, *guesses])
        kept = self.ledger.trim(slot, length + 1 + n_right)
        assert not (can_return and self.context.is_recurrent) or kept >= length
        self.compute(slot, self.words(1))

    def interrupt(self) -> None:
        """Interrupt a pass half way or before it begins."""
        if (slot := self.busy_slot(BATCH)) is None:
            return
        start = len(self.ledger.tokens[slot])
        self.context.interrupt()
        with pytest.raises(Aborted):
            self.context.decode(rows_of(slot, start, self.words(BATCH)))
        self.ledger.restore(slot)

    def fork(self) -> None:
        if (slot := self.busy_slot()) is None or not self.ledger.n_idle:
            return
        self.ledger.fork(slot, self.ledger.claim_slot())

    def preempt(self) -> None:
        if (slot := self.busy_slot()) is None:
            return
        if swapped := self.swap.swap_out(slot):
            self.swapped.append(swapped)
        self.ledger.trim(slot, 0)
        self.ledger.release(slot)

    def resume(self) -> None:
        if not self.swapped or not self.ledger.n_idle:
            return
        swapped = self.swapped.pop(self.rng.randrange(len(self.swapped)))
        slot = self.ledger.claim_slot()
        if not self.swap.swap_in(slot, swapped):
            self.ledger.release(slot)

    def release(self) -> None:
        if (slot := self.busy_slot()) is not None:
            self.texts.append(list(self.ledger.tokens[slot]) or [5])
            self.ledger.release(slot)

    def check(self) -> None:
        self.ledger.check()
        assert self.store.nbytes <= self.store.max_bytes
        for slot in range(SLOTS):
            lengths = [found.length for found in self.ledger.checkpoints.of_slot(slot)]
            assert lengths == sorted(set(lengths))
            assert not lengths or lengths[-1] <= len(self.ledger.tokens[slot])


def rows_of(slot: int, start: int, tokens: list[int]) -> BatchRows:
    """Return the rows of a pass of one slot, the last with logits."""
    count = len(tokens)
    outputs = [index == count - 1 for index in range(count)]
    return BatchRows(tokens, range(start, start + count), [slot] * count, outputs)


def fresh_logits(fresh: Context, tokens: list[int]) -> np.ndarray:
    """Return the logits of the last token, computed in an empty context."""
    fresh.clear()
    for at in range(0, len(tokens), BATCH):
        rows = fresh.decode(rows_of(0, at, tokens[at : at + BATCH]))
    return rows[0].logits


@pytest.mark.parametrize("n_rs_seq", [0, 3])
@pytest.mark.parametrize("seed", range(2))
def test_any_mix_of_operations_has_the_logits_of_a_fresh_context(
    model_file: Path, seed: int, n_rs_seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a tiny model computes a token faster than its state is copied
    monkeypatch.setattr(offload, "is_worth_storing", lambda cost: True)
    monkeypatch.setattr(offload_store, "is_worth_restoring", lambda cost: True)
    options = ContextOptions(CELLS, BATCH, BATCH, 1, 1, 1, "f32", "f32", "off")
    tested = replace(options, n_seq_max=SLOTS, n_rs_seq=n_rs_seq)
    with (
        open_model(model_file) as model,
        open_context(model, options) as fresh,
        open_context(model, tested) as context,
    ):
        play = Play(context, fresh, seed)
        operations = {
            play.answer: 30,
            play.extend: 10,
            play.draft: 10,
            play.interrupt: 6,
            play.fork: 6,
            play.preempt: 5,
            play.resume: 8,
            play.release: 30,
        }
        for _ in range(N_OPERATIONS):
            play.rng.choices([*operations], [*operations.values()])[0]()
            play.check()
        assert play.n_reused or not play.store.max_bytes
