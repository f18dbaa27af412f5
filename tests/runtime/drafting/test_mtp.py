"""Drafts of a model's own prediction layers: the answers are those of plain decoding, and the
layers see the hidden states of the text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.prediction_context import read_states
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.acceptance import Acceptance
from llmcli.runtime.drafting.base import Draft
from llmcli.runtime.drafting.hidden_state_drafter import HiddenStateDrafts
from llmcli.runtime.drafting.mtp import PredictionDrafter
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.quant import predicting_checkpoint, tiny_gguf

GREEDY = default_sampling().with_values({"temp": 0})
PROMPT = tuple(int(token) for token in np.random.default_rng(2).integers(3, 500, 150))


@pytest.fixture(scope="module", params=["Qwen3_5ForCausalLM", "DeepseekV3ForCausalLM"])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a prediction layer: a hybrid, and one with compressed keys."""
    pytest.importorskip("torch", reason="torch is not installed: no checkpoint")
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    folder = tmp_path_factory.mktemp("mtp")
    predicting_checkpoint.build(request.param, folder / "tiny")
    source = checkpoint_source.open_checkpoint(folder / "tiny")
    write.write_model(plan.plan_quantization(source, "F32"), folder / "m.gguf", threads=1)
    return folder / "m.gguf"


@pytest.fixture(autouse=True)
def speed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runtime.draft_settings._pays", lambda cost, max_rows: True)


@contextmanager
def open_small(path: Path, drafting: DraftSettings, slots: int = 1) -> Iterator[Runner]:
    options = RunOptions(ctx_size=512, threads=1, batch_size=128, ubatch_size=128)
    with open_runner(path, options, slots=slots, drafting=drafting) as runner:
        runner.engine.schedule = replace(runner.engine.schedule, host_bytes=1 << 28)
        yield runner


def answer(runner: Runner, prompt: tuple[int, ...] = PROMPT, count: int = 40) -> Answer:
    stream = runner.reply(
        Request(
            prompt,
            GREEDY,
            max_tokens=count,
            strategy=runner.default_strategy(),
            ignore_eos=True,
            allow_repetition=True,
        )
    )
    list(stream)
    runner.engine.check()
    return stream.answer


def always_drafts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> PredictionDrafter:
    """Make drafts always seem worth their time, and return the drafter."""
    monkeypatch.setattr(
        "llmcli.runtime.drafting.draft_length.DraftLength.rate",
        lambda self, guesses, limit: (2.0, len(guesses.chances(int(min(3, limit))))),
    )
    (drafter,) = runner.engine.resources.speculation.drafters
    return drafter


def test_the_answer_is_that_of_plain_decoding(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(model_file, NO_DRAFTING) as plain:
        expected = [answer(plain), answer(plain, PROMPT[:40]), answer(plain)]
    with open_small(model_file, DraftSettings(method="mtp")) as runner:
        always_drafts(runner, monkeypatch)
        drafted = [answer(runner), answer(runner, PROMPT[:40]), answer(runner)]
    for first, second in zip(expected, drafted, strict=True):
        assert [token.id for token in first.tokens] == [token.id for token in second.tokens]
        assert second.n_drafted


def test_the_first_guess_is_that_of_the_layers_over_the_whole_text(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each first guess is the likeliest token when all tokens are computed by the layers at once."""
    with open_small(model_file, DraftSettings(method="mtp")) as runner:
        drafter = always_drafts(runner, monkeypatch)
        guesses: list[tuple[list[int], int]] = []
        rows: dict[int, np.ndarray] = {}
        observe = drafter.observe

        def keep_states(batch: BatchRows) -> None:
            states = read_states(drafter.target, len(batch)).copy()
            rows.update(zip(batch.positions, states, strict=True))
            observe(batch)

        drafter.target.on_computed = keep_states
        draft = HiddenStateDrafts.draft

        def keep_guesses(self: HiddenStateDrafts, count: int) -> Draft:
            found = draft(self, count)
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
            guesses.append((found.tokens, likeliest))
            return found

        monkeypatch.setattr(HiddenStateDrafts, "draft", keep_guesses)
        answer(runner, count=24)
    assert len(guesses) > 5
    assert all(found[0] == likeliest for found, likeliest in guesses)


def test_a_sequence_beside_others_is_not_drafted_for(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(model_file, DraftSettings(method="mtp"), slots=2) as runner:
        always_drafts(runner, monkeypatch)
        engine = runner.engine
        requests = [
            Request(PROMPT[start:], GREEDY, max_tokens=8, strategy="speculative", ignore_eos=True)
            for start in (0, 50)
        ]
        ids = [engine.submit(request) for request in requests]
        while engine.is_busy:
            engine.step()
        assert [len(engine.pop_answer(number).tokens) for number in ids] == [8, 8]
        assert answer(runner).n_drafted


def test_a_model_without_prediction_layers_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=2)
    with (
        pytest.raises(UserError, match="no layers that predict") as error,
        open_small(path, DraftSettings(method="mtp")),
    ):
        pass
    assert "--no-mtp" in error.value.hint


def test_chances_are_counted_by_depth() -> None:
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.record(3, 1)
    first, second, third = acceptance.chances(3)
    assert first > 0.95
    assert second < 0.1
    assert third == second  # it was never checked
