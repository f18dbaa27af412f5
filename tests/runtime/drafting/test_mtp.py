"""Drafts of a model's own prediction layers: the answers are those of plain decoding, and the
layers see the hidden states of the text.
"""

from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.prediction_context import extensions, read_states
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.base import Draft
from llmcli.runtime.drafting.gain.acceptance import Acceptance
from llmcli.runtime.drafting.gain.tree_shape import TreeShape
from llmcli.runtime.drafting.hidden_state_drafter import HiddenStateDrafts
from quant.convert import checkpoint_source
from quant.model_file import product_weights, read_header
from quant.quantize import plan, write
from tests.fixtures.small_runner import (
    answer,
    best_path,
    check_drafted_cells,
    check_only_lone_answers_are_drafted,
    draft_always,
    ids,
    open_small,
)
from tests.quant import predicting_checkpoint, tiny_gguf

PROMPT = tuple(int(token) for token in np.random.default_rng(2).integers(3, 500, 150))
PROMPTS = (PROMPT, PROMPT[:40], PROMPT)


@pytest.fixture(scope="module", params=["Qwen3_5ForCausalLM", "DeepseekV3ForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a prediction layer: a hybrid, and one with compressed keys."""
    pytest.importorskip("torch", reason="torch is not installed: no checkpoint")
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    return predicting_checkpoint.build(request.param, tmp_path_factory.mktemp("mtp") / "tiny")


@pytest.fixture(scope="module")
def model_file(checkpoint: Path) -> Path:
    return convert(checkpoint, "F32")


def convert(checkpoint: Path, kind: str) -> Path:
    """Write a GGUF file beside a checkpoint, and return its path."""
    path = checkpoint.with_name(f"{kind}.gguf")
    source = checkpoint_source.open_checkpoint(checkpoint)
    write.write_model(plan.plan_quantization(source, kind), path, threads=1)
    return path


@pytest.fixture(autouse=True)
def speed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda cost, max_rows: True)


def test_the_answer_is_that_of_plain_decoding(model_file: Path) -> None:
    with open_small(model_file, NO_DRAFTING) as plain:
        expected = [answer(plain, prompt) for prompt in PROMPTS]
    with open_small(model_file, DraftSettings(method="mtp")) as runner:
        draft_always(runner, 3)
        drafted = [answer(runner, prompt) for prompt in PROMPTS]
    for first, second in zip(expected, drafted, strict=True):
        assert ids(first) == ids(second)
        assert second.n_drafted


def test_the_default_does_not_change_the_answer_of_a_seed(checkpoint: Path) -> None:
    """Several rows of a pass have bit for bit the logits of single ones. A model with float weights,
    such as those that choose experts, has other last bits, which a quantized cache may enlarge, so
    nothing is drafted for it.
    """
    path, cache = convert(checkpoint, "Q8_0"), {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    has_floats = bool(product_weights.float_weights(read_header.read_header(path)))
    assert has_floats == ("DeepseekV3" in (checkpoint / "config.json").read_text())
    found = []
    for drafting in (NO_DRAFTING, DraftSettings()):
        with open_small(path, drafting, **cache) as runner:
            if drafting is not NO_DRAFTING and not has_floats:
                draft_always(runner, 3, "mtp")
            found.append([answer(runner, PROMPT, temp=0.7, seed=seed) for seed in (1, 2)])
    for first, second in zip(*found, strict=True):
        assert ids(first) == ids(second)
        assert bool(second.n_drafted) != has_floats


def test_reproducible_answers_are_not_drafted_by_prediction_layers(model_file: Path) -> None:
    with (
        pytest.raises(UserError, match="--draft mtp does not work with --reproducible"),
        open_small(model_file, DraftSettings(method="mtp"), is_reproducible=True),
    ):
        pass


def test_nothing_stays_open_where_drafts_do_not_pay(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes of the model then also keep no hidden states."""
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda cost, max_rows: False)
    switched: list[tuple[bool, bool]] = []
    library = extensions()
    switch = library.llama_set_embeddings_nextn

    def keep(context: object, value: bool, masked: bool) -> None:
        switched.append((value, masked))
        switch(context, value, masked)

    monkeypatch.setattr(library, "llama_set_embeddings_nextn", keep)
    with open_small(model_file, DraftSettings(method="mtp")) as runner:
        assert runner.engine.resources.speculation is None
        assert not runner.context.outputs_states
        assert switched == [(True, False), (False, False)]
        assert ids(answer(runner, PROMPT, 8))


def test_the_first_guess_is_that_of_the_layers_over_the_whole_text(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each first guess is the likeliest token when all tokens are computed by the layers at once."""
    with open_small(model_file, DraftSettings(method="mtp")) as runner:
        drafter = draft_always(runner, 3)
        guesses: list[tuple[list[int], int]] = []
        rows: dict[int, np.ndarray] = {}
        observe = drafter.observe

        def keep_states(batch: BatchRows) -> None:
            states = read_states(drafter.target, len(batch)).copy()
            rows.update(zip(batch.positions, states, strict=True))
            observe(batch)

        drafter.target.on_computed = keep_states
        draft = HiddenStateDrafts.draft

        def keep_guesses(self: HiddenStateDrafts, shape: TreeShape) -> Draft:
            found = draft(self, shape)
            end = len(self.sequence.tokens)
            states = [np.zeros(drafter.context.n_embd), *(rows[at] for at in range(end - 1))]
            drafter.context.cut(0)
            start, likeliest = 0, -1
            while start < end:
                stop = min(end, start + drafter.context.n_batch)
                row = drafter.context.predict(
                    self.sequence.tokens[start:stop], start, np.stack(states[start:stop])
                )
                likeliest, start = int(row.logits.argmax()), stop
            drafter.context.cut(drafter.first)
            guesses.append((best_path(found), likeliest))
            return found

        monkeypatch.setattr(HiddenStateDrafts, "draft", keep_guesses)
        answer(runner, PROMPT, 24)
    assert len(guesses) > 5
    assert all(found[0] == likeliest for found, likeliest in guesses)


def test_a_text_that_came_from_host_memory_is_not_mistaken_for_an_earlier_one(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot had a longer text, whose rows the layers know, before it got back a shorter one."""
    short = PROMPT[100:]
    with open_small(model_file, NO_DRAFTING) as plain:
        begun = (*short, *ids(answer(plain, short)))
        expected = ids(answer(plain, begun))
    with open_small(model_file, DraftSettings(method="mtp")) as runner:
        counts = check_drafted_cells(draft_always(runner, 3), monkeypatch)
        answer(runner, short)
        answer(runner, PROMPT)
        assert counts[-1] > len(PROMPT)
        found = answer(runner, begun)
        assert found.cached_tokens > len(short)
        assert ids(found) == expected
        assert found.n_drafted
        assert counts[-1] < len(begun)  # nothing is known of the part that was not computed


def test_a_sequence_beside_others_is_not_drafted_for(model_file: Path) -> None:
    with open_small(model_file, DraftSettings(method="mtp"), slots=2) as runner:
        draft_always(runner, 3)
        check_only_lone_answers_are_drafted(runner, PROMPT)


def test_a_model_without_prediction_layers_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=2)
    with (
        pytest.raises(UserError, match="no layers that predict") as error,
        open_small(path, DraftSettings(method="mtp")),
    ):
        pass
    assert error.value.hint == "leave out --draft mtp, or use --draft ngram"


def test_chances_are_counted_by_depth() -> None:
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.record([(7,), (8,), (9,)], [7, 1])
    (first,), (second,), (third,) = acceptance.chances(3)
    assert first > 0.95
    assert second < 0.1
    assert third == second  # it was never checked
