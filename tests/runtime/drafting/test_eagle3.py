"""Drafts of an EAGLE-3 draft: the answers are those of plain decoding, the guesses are those of the
paper's equations, and files that llama.cpp would abort at are refused.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts import eagle_context
from llmcli.runtime.binding.contexts.eagle_context import EagleContext
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.base import Draft
from llmcli.runtime.drafting.eagle3 import EagleDrafter
from llmcli.runtime.drafting.gain.acceptance import Acceptance
from llmcli.runtime.drafting.gain.tree_shape import TreeShape
from llmcli.runtime.drafting.hidden_state_drafter import HiddenStateDrafts
from llmcli.runtime.requests.context_overflow import AttentionSinks
from llmcli.runtime.runner import Runner
from quant.model_file.read_header import read_header
from quant.quantize import plan, write
from tests.fixtures.cli import Done
from tests.fixtures.eagle3_oracle import Oracle
from tests.fixtures.small_runner import (
    answer,
    best_path,
    check_drafted_cells,
    check_only_lone_answers_are_drafted,
    draft_always,
    ids,
    make_request,
    open_small,
)
from tests.quant import predicting_checkpoint, tiny_gguf

PROMPT = tuple(int(token) for token in np.random.default_rng(2).integers(3, 300, 150))
PROMPTS = (PROMPT, PROMPT[:40], PROMPT)
EVEN_TOKENS = np.arange(0, 300, 2)
# forms of drafts: with a small vocabulary, with the target's output, and with all weights
FORMS: dict[str, dict[str, Any]] = {
    "small-vocabulary": {"draft_tokens": EVEN_TOKENS},
    "shared": {"with_output": False},
    "own": {"hidden": 32, "with_embeddings": True, "norm_before_fc": True},
}
MAX_DIFFERENCE = 0.015  # of logits; the cache of the draft has 16-bit floats


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
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda cost, max_rows: True)


def always_drafts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> EagleDrafter:
    """Make all drafts as long as possible, and return the drafter."""
    monkeypatch.setattr("llmcli.runtime.drafting.hidden_state_drafter.MIN_PROBABILITY", 0.0)
    drafter = draft_always(runner, 3)
    assert isinstance(drafter, EagleDrafter)
    return drafter


def test_the_answer_is_that_of_plain_decoding(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(target, NO_DRAFTING) as plain:
        expected = [answer(plain, prompt) for prompt in PROMPTS]
    with open_small(target, DraftSettings(model=draft)) as runner:
        always_drafts(runner, monkeypatch)
        drafted = [answer(runner, prompt) for prompt in PROMPTS]
    for first, second in zip(expected, drafted, strict=True):
        assert ids(first) == ids(second)
        assert second.n_drafted


@pytest.mark.parametrize("is_tree", [False, True], ids=["path", "tree"])
def test_the_logits_of_guesses_are_those_of_the_equations(
    is_tree: bool, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of the first and the last guess of each draft are compared with those that numpy
    computes for the whole text and the guesses before. In trees, paths of any rank are kept, because
    four tokens are about equally likely.
    """
    drafts: list[tuple[list[int], list[int], list[np.ndarray]]] = []
    rows: list[np.ndarray] = []
    make_draft, predict = HiddenStateDrafts.draft, EagleContext.predict

    def keep_logits(self: EagleContext, *arguments: Any) -> Any:
        row = predict(self, *arguments)
        rows.append(row.logits.copy())
        return row

    def keep_guesses(self: HiddenStateDrafts, shape: TreeShape) -> Draft:
        found = make_draft(self, shape)
        assert self.sequence
        drafts.append(
            (list(self.sequence.tokens), best_path(found), rows[-len(found.candidates) :])
        )
        return found

    with open_small(target, DraftSettings(model=draft)) as runner:
        always_drafts(runner, monkeypatch)
        monkeypatch.setattr(EagleContext, "predict", keep_logits)
        monkeypatch.setattr(HiddenStateDrafts, "draft", keep_guesses)
        if is_tree:
            draft_always(runner, 11)
            monkeypatch.setattr(
                Acceptance,
                "chances",
                lambda self, n_depths, n_ranks=1: [[0.4, 0.3, 0.2, 0.1][:n_ranks]] * n_depths,
            )
            bias = tuple(f"{token}+100" for token in (10, 12, 14, 16))
            found = answer(runner, PROMPT[:80], 24, temp=1.5, seed=2, logit_bias=bias)
            assert found.n_accepted > 3
        else:
            answer(runner, PROMPT[:80], 16)
    oracle = Oracle(target, draft)
    assert len(drafts) > 3
    for text, guesses, found in [*drafts[:4], drafts[-1]]:
        for number in (0, len(guesses) - 1):
            expected = oracle.logits(text, guesses[:number])
            assert np.array_equal(np.isinf(expected), np.isinf(found[number]))
            is_possible = np.isfinite(expected)
            difference = expected[is_possible] - found[number][is_possible]
            assert np.abs(difference).max() < MAX_DIFFERENCE


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
            inputs = drafter.read_states(len(batch))
            rows.update(zip(batch.positions, inputs, strict=True))
            observe(batch)

        drafter.target.on_computed = keep_inputs
        make_draft = HiddenStateDrafts.draft

        def keep_guesses(self: HiddenStateDrafts, shape: TreeShape) -> Draft:
            found = make_draft(self, shape)
            assert self.sequence
            text = self.sequence.tokens
            states = np.vstack([drafter.encode(rows[at][None]) for at in range(len(text) - 1)])
            drafter.context.cut(0)
            start, likeliest = 1, -1
            while start < len(text):
                stop = min(len(text), start + drafter.context.n_batch)
                row = drafter.context.predict(text[start:stop], start, states[start - 1 : stop - 1])
                likeliest, start = int(row.logits.argmax()), stop
            drafter.context.cut(drafter.first)
            guesses.append((best_path(found), likeliest))
            return found

        monkeypatch.setattr(HiddenStateDrafts, "draft", keep_guesses)
        answer(runner, PROMPT, 24)
    assert len(guesses) > 5
    assert all(found[0] == likeliest for found, likeliest in guesses)


def test_a_draft_of_the_small_vocabulary_is_drawn_from_its_tokens_only(
    target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Draft] = []
    make_draft = HiddenStateDrafts.draft

    def keep(self: HiddenStateDrafts, shape: TreeShape) -> Draft:
        drawn.append(make_draft(self, shape))
        return drawn[-1]

    monkeypatch.setattr(HiddenStateDrafts, "draft", keep)
    with open_small(target, DraftSettings(model=small_draft)) as runner:
        always_drafts(runner, monkeypatch)
        assert answer(runner, PROMPT[:40], 24, temp=1.0, seed=3).n_drafted
    probabilities = [each for found in drawn for each in found.distributions]
    assert len(probabilities) > 10
    for each in probabilities:
        assert each.sum() == pytest.approx(1, abs=1e-4)
        assert not each[EVEN_TOKENS + 1].any()


@pytest.mark.parametrize("method", ["encode", "predict"])
def test_an_interrupted_draft_is_empty_and_the_answer_goes_on(
    method: str, target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third pass of the draft ends early, in prompts and in answers."""
    with open_small(target, NO_DRAFTING) as plain:
        expected = ids(answer(plain, PROMPT))
    with open_small(target, DraftSettings(model=small_draft)) as runner:
        always_drafts(runner, monkeypatch)
        compute, n_calls = getattr(EagleContext, method), 0

        def interrupt_some(self: EagleContext, *arguments: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls % 3 == 0:
                self.interrupt()
            return compute(self, *arguments)

        monkeypatch.setattr(EagleContext, method, interrupt_some)
        found = answer(runner, PROMPT)
        assert ids(found) == expected
        assert found.n_drafted
        assert n_calls > 12


def test_a_request_that_is_cancelled_inside_a_draft_leaves_the_drafter_usable(
    target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(target, NO_DRAFTING) as plain:
        expected = ids(answer(plain, PROMPT))
    with open_small(target, DraftSettings(model=small_draft)) as runner:
        always_drafts(runner, monkeypatch)
        engine, predict, n_calls = runner.engine, EagleContext.predict, 0
        number = engine.submit(make_request(runner, PROMPT))

        def cancel(self: EagleContext, *arguments: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls == 12:
                engine.cancel(number)
                self.interrupt()
            return predict(self, *arguments)

        monkeypatch.setattr(EagleContext, "predict", cancel)
        while engine.is_busy:
            engine.step()
        assert engine.pop_answer(number).finish == "cancelled"
        assert ids(answer(runner, PROMPT)) == expected


def test_the_answer_in_a_full_context_is_that_of_plain_decoding(
    target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for drafting in (NO_DRAFTING, DraftSettings(model=small_draft)):
        with open_small(target, drafting, ctx_size=256) as runner:
            if drafting.model:
                always_drafts(runner, monkeypatch)
            found.append(answer(runner, PROMPT, 200))
    assert len(found[0].tokens) > 100
    assert ids(found[0]) == ids(found[1])
    assert found[0].finish == found[1].finish
    assert found[1].n_drafted


def test_moved_cells_begin_a_new_text_for_the_draft(
    target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(target, DraftSettings(model=small_draft), ctx_size=256) as runner:
        assert runner.context.can_shift
        drafter = always_drafts(runner, monkeypatch)
        counts = check_drafted_cells(drafter, monkeypatch)
        overflow = AttentionSinks(4)
        stream = runner.reply(replace(make_request(runner, PROMPT, 300), overflow=overflow))
        list(stream)
        runner.engine.check()
        assert len(stream.answer.tokens) == 300
    at = next(at for at in range(1, len(counts)) if counts[at] < counts[at - 1] - 50)
    assert counts[at] < 8  # of the text after the cells were moved
    assert len(counts) > at + 5


def test_the_inputs_of_layers_are_not_kept_where_drafts_do_not_pay(
    target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda cost, max_rows: False)
    switched: list[tuple[int, bool]] = []
    switch, read = eagle_context._layer_functions()

    def keep(pointer: object, layer: int, value: bool) -> None:
        switched.append((layer, value))
        switch(pointer, layer, value)

    monkeypatch.setattr(eagle_context, "_layer_functions", lambda: (keep, read))
    with open_small(target, DraftSettings(model=small_draft)) as runner:
        assert runner.engine.resources.speculation is None
        enabled = {layer for layer, value in switched if value}
        assert enabled == {layer for layer, value in switched if not value}
        assert len(enabled) == 3
        assert ids(answer(runner, PROMPT, 8))


def test_after_an_error_of_llama_cpp_nothing_more_is_drafted(
    target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(target, NO_DRAFTING) as plain:
        expected = ids(answer(plain, PROMPT))
    with open_small(target, DraftSettings(model=small_draft)) as runner:
        always_drafts(runner, monkeypatch)
        calls: list[int] = []

        def fail(self: EagleContext, *arguments: Any) -> Any:
            calls.append(1)
            raise UserError("llama.cpp could not compute this batch", hint="")

        monkeypatch.setattr(EagleContext, "predict", fail)
        found = [answer(runner, PROMPT[:40]), answer(runner, PROMPT)]
        assert ids(found[1]) == expected
        assert not any(each.n_drafted for each in found)
    assert len(calls) == 1


def test_a_sequence_beside_others_is_not_drafted_for(
    target: Path, small_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(target, DraftSettings(model=small_draft), slots=2) as runner:
        always_drafts(runner, monkeypatch)
        check_only_lone_answers_are_drafted(runner, PROMPT)


def test_reproducible_answers_stay_equal_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 32 values, which a q8_0 cache needs, and quantized weights."""
    floats = tiny_gguf.llama(tmp_path / "f.gguf", hidden=128, ff=128, layers=6)
    path = tmp_path / "m.gguf"
    write.write_model(plan.plan_quantization(write.open_gguf(floats), "Q8_0"), path, threads=1)
    draft = tiny_gguf.eagle3(tmp_path / "d.gguf", hidden=128, target_hidden=128)
    found = []
    for drafting in (NO_DRAFTING, DraftSettings(model=draft)):
        with open_small(path, drafting, is_reproducible=True) as runner:
            if drafting.model:
                always_drafts(runner, monkeypatch)
            found.append(answer(runner, PROMPT, temp=0.7, seed=3))
    assert ids(found[0]) == ids(found[1])
    assert [each.logprob for each in found[0].tokens] == [each.logprob for each in found[1].tokens]
    assert found[1].n_drafted


def test_a_hybrid_gives_the_state_after_its_last_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with recurrent state, whose drafts go back, and a draft that reads its last state."""
    path = predicting_checkpoint.write_gguf(tmp_path / "m.gguf")
    header = read_header(path)
    n_layers = header.get_int("block_count") - 1
    draft = tiny_gguf.eagle3(
        tmp_path / "d.gguf",
        target_hidden=header.get_int("embedding_length"),
        hidden=header.get_int("embedding_length"),
        target_layers=(0, 1, n_layers),
        vocab=header.metadata["tokenizer.ggml.tokens"].count,
        target=path,
    )
    with open_small(path, NO_DRAFTING) as plain:
        expected = [ids(answer(plain, prompt)) for prompt in PROMPTS]
    with open_small(path, DraftSettings(model=draft)) as runner:
        drafter = always_drafts(runner, monkeypatch)
        seen: list[np.ndarray] = []
        observe = drafter.observe

        def keep(batch: BatchRows) -> None:
            seen.append(drafter.read_states(len(batch)))
            observe(batch)

        drafter.target.on_computed = keep
        found = [answer(runner, prompt) for prompt in PROMPTS]
        assert [ids(each) for each in found] == expected
        assert all(each.n_drafted for each in found)
        width = drafter.draft.inputs.width
        assert all(np.abs(rows[:, 2 * width :]).min(axis=1).all() for rows in seen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_hidden": 32}, "it reads hidden states of 32 numbers, but the model has 64"),
        ({"target_layers": (1, 3, 9)}, "it reads layer 9, but the model has 6 layers"),
        ({"target_layers": (1, 3, 6)}, "it reads the state after layer 5, which llama does not"),
        ({"vocab": 310}, "its vocabulary is different: it has 310 tokens"),
        ({"hidden": 32}, "it has no embeddings of tokens, and a width of 32 instead of 64"),
        (
            {"hidden": 32, "with_embeddings": True, "with_output": False},
            "it has no output, and a width of 32 instead of 64",
        ),
        ({"draft_tokens": [5, 300]}, "d2t names tokens outside the vocabulary of 300"),
        ({"draft_tokens": [5, -1]}, "d2t names tokens outside the vocabulary of 300"),
        ({"draft_tokens": [5, 5]}, "d2t names a token twice"),
        ({"draft_tokens": [5, 6], "with_output": False}, "d2t has 2 tokens instead of 300"),
        ({"n_layers": 2}, "it has 2 layers instead of one"),
        ({"target_layers": (1, 2, 3, 4)}, "it reads the layers [1, 2, 3, 4] instead of 3"),
        ({"target_layers": (-1, 2, 3)}, "it reads the layers [-1, 2, 3] instead of 3"),
    ],
)
def test_a_draft_for_another_model_is_refused_before_it_is_loaded(
    settings: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    path = tiny_gguf.eagle3(tmp_path / "d.gguf", **settings)
    with pytest.raises(UserError) as error, open_small(target, DraftSettings(model=path)):
        pass
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.hint


def test_a_model_whose_layers_cannot_be_read_is_refused(tmp_path: Path) -> None:
    target = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=64)
    path = tiny_gguf.eagle3(tmp_path / "d.gguf", target_layers=(0, 1, 1))
    with (
        pytest.raises(UserError, match="architecture gemma3"),
        open_small(target, DraftSettings(model=path)),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("run", "TARGET", "hi", "--draft", "eagle3"), "--draft eagle3 needs", "-md REF"),
        (
            ("run", "TARGET", "hi", "--draft", "eagle3", "-md", "TARGET"),
            "--draft eagle3: m.gguf is a model of architecture llama",
            "hint: use --draft model, or name another file with -md REF",
        ),
        (
            ("run", "TARGET", "hi", "--draft", "model", "-md", "DRAFT"),
            "--draft model: d.gguf is an EAGLE-3 draft",
            "--draft eagle3",
        ),
        (
            ("run", "TARGET", "hi", "-md", "DRAFT", "--draft", "eagle3", "--ngram-draft", "on"),
            "--draft eagle3 does not use --ngram-draft",
            "leave out",
        ),
        (("run", "DRAFT", "hi"), "d.gguf only drafts tokens for the model", "llmcli chat REF -md"),
        (("chat", "DRAFT", "--trust"), "d.gguf only drafts tokens", "llmcli chat REF -md"),
        (("plan", "DRAFT"), "d.gguf only drafts tokens", "llmcli chat REF -md"),
    ],
)
def test_a_wrong_use_is_one_error_with_the_next_thing_to_type(
    words: tuple[str, ...],
    message: str,
    hint: str,
    target: Path,
    small_draft: Path,
    llmcli: Callable[..., Done],
) -> None:
    files = {"TARGET": str(target), "DRAFT": str(small_draft)}
    done = llmcli(*(files.get(word, word) for word in words))
    assert done.code in (1, 2)
    error, advice = done.err.splitlines()[-2:]
    assert message in error
    assert hint in advice
    assert "Traceback" not in done.err


def test_a_draft_file_alone_means_draft_eagle3(
    target: Path, small_draft: Path, llmcli: Callable[..., Done]
) -> None:
    words = (str(target), "-md", str(small_draft), "-c", "256", "-t", "1")
    done = llmcli("run", *words, "-p", "hi", "-n", "4", "--raw", "--temp", "0")
    assert done.code == 0, done.err
    plain = llmcli("run", str(target), *words[3:], "-p", "hi", "-n", "4", "--raw", "--temp", "0")
    assert done.out == plain.out
    planned = llmcli("plan", *words, "--json")
    assert planned.code == 0, planned.err
    file_bytes = small_draft.stat().st_size
    inputs_bytes = 4 * 3 * 64 * 2048  # of three layers for the rows of a batch
    draft_bytes = json.loads(planned.out)["draft_bytes"]
    assert inputs_bytes + 0.9 * file_bytes < draft_bytes < inputs_bytes + file_bytes + (8 << 20)
