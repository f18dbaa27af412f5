"""Drafts of an EAGLE-3 draft: the answers are those of plain decoding, the draft sees the layers of
the model, and files that llama.cpp would abort at are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.base import Draft
from llmcli.runtime.drafting.eagle3 import EagleDrafter
from llmcli.runtime.drafting.hidden_state_drafter import HiddenStateDrafts
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from tests.quant import tiny_gguf

GREEDY = default_sampling().with_values({"temp": 0})
PROMPT = tuple(int(token) for token in np.random.default_rng(2).integers(3, 300, 150))
EVEN_TOKENS = np.arange(0, 300, 2)
# forms of drafts: with a small vocabulary, with the target's output, and with all weights
FORMS = {
    "small-vocabulary": {"draft_tokens": EVEN_TOKENS},
    "shared": {"with_output": False},
    "own": {"hidden": 32, "with_embeddings": True, "norm_before_fc": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of six layers."""
    path = tmp_path_factory.mktemp("target") / "m.gguf"
    return tiny_gguf.llama(path, hidden=64, ff=128, layers=6)


@pytest.fixture(params=FORMS)
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_gguf.eagle3(tmp_path / "d.gguf", **FORMS[request.param])


@pytest.fixture
def small_draft(tmp_path: Path) -> Path:
    return tiny_gguf.eagle3(tmp_path / "d.gguf", draft_tokens=EVEN_TOKENS)


@pytest.fixture(autouse=True)
def speed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runtime.draft_settings._pays", lambda cost, max_rows: True)


@contextmanager
def open_small(
    path: Path, drafting: DraftSettings, slots: int = 1, ctx_size: int = 512
) -> Iterator[Runner]:
    options = RunOptions(ctx_size=ctx_size, threads=1, batch_size=128, ubatch_size=128)
    with open_runner(path, options, slots=slots, drafting=drafting) as runner:
        runner.engine.schedule = replace(runner.engine.schedule, host_bytes=1 << 28)
        yield runner


def answer(
    runner: Runner, prompt: tuple[int, ...] = PROMPT, count: int = 40, **settings: object
) -> Answer:
    stream = runner.reply(
        Request(
            prompt,
            default_sampling().with_values({"temp": 0, **settings}),
            max_tokens=count,
            strategy=runner.default_strategy(),
            ignore_eos=True,
            allow_repetition=True,
        )
    )
    list(stream)
    runner.engine.check()
    return stream.answer


def ids(found: Answer) -> list[int]:
    return [token.id for token in found.tokens]


def always_drafts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> EagleDrafter:
    """Make drafts always seem worth their time and sure, and return the drafter."""
    monkeypatch.setattr(
        "llmcli.runtime.drafting.draft_length.DraftLength.rate",
        lambda self, guesses, limit: (2.0, len(guesses.chances(int(min(3, limit))))),
    )
    monkeypatch.setattr("llmcli.runtime.drafting.hidden_state_drafter.MIN_PROBABILITY", 0.0)
    (drafter,) = runner.engine.resources.speculation.drafters
    assert drafter.name == "eagle3"
    return drafter


def test_the_answer_is_that_of_plain_decoding(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(target, NO_DRAFTING) as plain:
        expected = [answer(plain), answer(plain, PROMPT[:40]), answer(plain)]
    with open_small(target, DraftSettings(model=draft)) as runner:
        always_drafts(runner, monkeypatch)
        drafted = [answer(runner), answer(runner, PROMPT[:40]), answer(runner)]
    for first, second in zip(expected, drafted, strict=True):
        assert ids(first) == ids(second)
        assert second.n_drafted


def test_the_first_guess_is_that_of_the_draft_over_the_whole_text(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each first guess is the likeliest token when the draft computes all tokens at once."""
    with open_small(target, DraftSettings(model=draft)) as runner:
        drafter = always_drafts(runner, monkeypatch)
        guesses: list[tuple[list[int], int]] = []
        rows: dict[int, np.ndarray] = {}
        observe = drafter.observe

        def keep_inputs(batch: BatchRows) -> None:
            inputs = drafter.draft.inputs.read(len(batch))
            rows.update(zip(batch.positions, inputs, strict=True))
            observe(batch)

        drafter.target.on_computed = keep_inputs
        make_draft = HiddenStateDrafts.draft

        def keep_guesses(self: HiddenStateDrafts, count: int) -> Draft:
            found = make_draft(self, count)
            text = self.sequence.tokens
            states = np.vstack([drafter.encode(rows[at][None]) for at in range(len(text) - 1)])
            drafter.context.cut(0)
            start, likeliest = 1, -1
            while start < len(text):
                stop = min(len(text), start + drafter.context.n_batch)
                row = drafter.context.predict(text[start:stop], start, states[start - 1 : stop - 1])
                likeliest, start = int(row.logits.argmax()), stop
            drafter.context.cut(drafter.first)
            guesses.append((found.tokens, likeliest))
            return found

        monkeypatch.setattr(HiddenStateDrafts, "draft", keep_guesses)
        answer(runner, count=24)
    assert len(guesses) > 5
    assert all(found[0] == likeliest for found, likeliest in guesses)
