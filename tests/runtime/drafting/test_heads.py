"""Drafts of heads (Medusa, blockwise): the answers are those of plain decoding, and the guesses are
those that numpy computes from the same hidden state.
"""

from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import EVERYWHERE
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.base import Draft
from llmcli.runtime.drafting.draft_files.heads_file import (
    BLOCKWISE,
    HEAD_METHODS,
    MEDUSA,
    HeadShapes,
    output_matrix,
)
from llmcli.runtime.drafting.gain.tree_shape import TreeShape
from llmcli.runtime.drafting.heads import HeadDrafter, HeadDrafts
from quant.model_file.read_header import read_header
from tests.fixtures.draft_heads import HeadWeights, write_heads
from tests.fixtures.small_runner import (
    answer,
    best_path,
    check_only_lone_answers_are_drafted,
    draft_always,
    ids,
    open_small,
)
from tests.quant import predicting_checkpoint, tiny_gguf

PROMPT = tuple(int(token) for token in np.random.default_rng(2).integers(3, 250, 20))
HIDDEN, VOCABULARY = 64, 300


def head_shapes(method: str, has_outputs: bool = False, n_heads: int = 4) -> HeadShapes:
    n_layers, n_hidden = (2, 0) if method == MEDUSA else (1, 96)
    return HeadShapes(method, HIDDEN, VOCABULARY, n_heads, n_layers, n_hidden, has_outputs)


def guess(
    shapes: HeadShapes, weights: HeadWeights, output: np.ndarray, state: np.ndarray
) -> list[int]:
    """Return the likeliest tokens of the heads, in float64."""
    found = []
    for head in range(shapes.n_heads):
        x = state.astype(np.float64)
        if shapes.method == BLOCKWISE:
            hidden = np.maximum(weights["hidden.weight"] @ x + weights["hidden.bias"], 0)
            x = x + weights[f"head.{head}.weight"] @ hidden + weights[f"head.{head}.bias"]
        else:
            for layer in range(shapes.n_layers):
                name = f"head.{head}.{layer}"
                y = weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
                x = x + y / (1 + np.exp(-y))
        matrix = weights.get(f"head.{head}.output.weight", output)
        found.append(int((matrix @ x).argmax()))
    return found


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose table of embeddings is its output matrix."""
    path = tmp_path_factory.mktemp("medusa") / "m.gguf"
    return tiny_gguf.llama(path, hidden=HIDDEN, ff=64, layers=2, vocab=VOCABULARY, tied=True)


@pytest.fixture(autouse=True)
def speed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda cost, max_rows: True)


@pytest.mark.parametrize("has_outputs", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("method", HEAD_METHODS)
def test_answers_are_plain_ones_and_guesses_are_those_of_numpy(
    model_file: Path,
    method: str,
    has_outputs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = head_shapes(method, has_outputs)
    weights = write_heads(tmp_path / "h.gguf", shapes, model_file)
    header = read_header(model_file)
    info = output_matrix(header)
    output = np.fromfile(info.file, np.float32, info.elements, offset=info.offset)
    output = output.reshape(VOCABULARY, HIDDEN)
    with open_small(model_file, NO_DRAFTING) as plain:
        expected = [answer(plain, PROMPT), answer(plain, PROMPT[:7])]
    drafts: list[tuple[list[int], list[int]]] = []
    with open_small(model_file, DraftSettings(model=tmp_path / "h.gguf", method=method)) as runner:
        drafter = draft_always(runner, 4)
        assert drafter.name == method
        draft = HeadDrafts.draft

        def keep_guesses(self: HeadDrafts, shape: TreeShape) -> Draft:
            found = draft(self, shape)
            assert self.state is not None
            drafts.append((best_path(found), guess(shapes, weights, output, self.state)))
            return found

        states: list[tuple[np.ndarray, int]] = []
        find_state = HeadDrafter.find_state

        def keep_state(self: HeadDrafter, sequence: object) -> np.ndarray | None:
            state = find_state(self, sequence)
            if state is not None:
                states.append((state, sequence.tokens[-1]))
            return state

        monkeypatch.setattr(HeadDrafts, "draft", keep_guesses)
        monkeypatch.setattr(HeadDrafter, "find_state", keep_state)
        drafted = [answer(runner, PROMPT), answer(runner, PROMPT[:7])]
    for first, second in zip(expected, drafted, strict=True):
        assert ids(first) == ids(second)
        assert second.n_drafted
    assert len(drafts) > 10
    assert all(found == known[: len(found)] for found, known in drafts)
    # the state is the one from which the model has chosen the last token
    assert len(states) > 10
    assert all(int((output @ state).argmax()) == token for state, token in states)


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_sampled_answers_are_those_of_the_seed(
    model_file: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_heads(tmp_path / "h.gguf", head_shapes(method), model_file)
    sampling = {"temp": 1.0, "seed": 7}
    with open_small(model_file, NO_DRAFTING) as plain:
        expected = answer(plain, PROMPT, 30, **sampling)
    with open_small(model_file, DraftSettings(model=tmp_path / "h.gguf", method=method)) as runner:
        draft_always(runner, 4)
        drafted = answer(runner, PROMPT, 30, **sampling)
    assert ids(expected) == ids(drafted)
    assert drafted.n_drafted


def test_after_an_error_of_ggml_nothing_more_is_drafted(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_heads(tmp_path / "h.gguf", head_shapes(MEDUSA), model_file)
    with open_small(model_file, DraftSettings(model=tmp_path / "h.gguf", method=MEDUSA)) as runner:
        drafter = draft_always(runner, 4)
        calls: list[int] = []

        def fail(state: np.ndarray, count: int, n_ranks: int) -> list[tuple[int, ...]]:
            calls.append(count)
            raise UserError("ggml could not compute the draft heads", hint="")

        monkeypatch.setattr(drafter.graph, "guess", fail)
        assert [answer(runner, PROMPT, 12).n_drafted for _ in range(2)] == [0, 0]
    assert calls == [4]


def test_right_guesses_are_accepted(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads whose own output matrices always give one token are right in a text that repeats it."""
    shapes = head_shapes(MEDUSA, has_outputs=True)
    write_heads(tmp_path / "h.gguf", shapes, model_file, scale=0.0)
    with open_small(model_file, DraftSettings(model=tmp_path / "h.gguf", method=MEDUSA)) as runner:
        drafter = draft_always(runner, 4)
        found = answer(runner, PROMPT, 30, logit_bias=("0+100",))
    assert ids(found) == [0] * 30
    assert found.n_drafted == found.n_accepted
    # four guesses and a token in each pass after the two that give the first state
    assert found.n_drafts == 6
    assert min(drafter.acceptance.chances(4)) > [0.8]


def test_an_answer_beside_others_is_not_drafted_for(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_heads(tmp_path / "h.gguf", head_shapes(MEDUSA), model_file)
    drafting = DraftSettings(model=tmp_path / "h.gguf", method=MEDUSA)
    with open_small(model_file, drafting, slots=2) as runner:
        draft_always(runner, 4)
        check_only_lone_answers_are_drafted(runner, PROMPT)


def test_final_states_are_those_of_passes_with_all_logits(model_file: Path) -> None:
    header = read_header(model_file)
    info = output_matrix(header)
    output = np.fromfile(info.file, np.float32, info.elements, offset=info.offset)
    output = output.reshape(VOCABULARY, HIDDEN)
    options = ContextOptions(64, n_outputs=8, outputs_final_states=True)
    with (
        open_model(model_file, EVERYWHERE.for_header(header)) as model,
        open_context(model, options) as context,
    ):
        (row,) = context.decode(BatchRows([5, 6, 7], range(3), [0] * 3, [False, False, True]))
        expected = row.logits.copy()
        assert context.final_state(2) is None
        context.clear()
        rows = context.decode(BatchRows([5, 6, 7], range(3), [0] * 3, [True] * 3))
        assert np.abs(rows[2].logits - expected).max() < 1e-4
        for index, row in enumerate(rows):
            state = context.final_state(index)
            assert state is not None
            assert np.abs(output @ state - row.logits).max() < 1e-4
        assert context.output_bytes == 4 * 3 * (VOCABULARY + HIDDEN)


def test_heads_draft_for_a_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = predicting_checkpoint.write_gguf(tmp_path / "m.gguf")
    n_embd, n_vocab = output_matrix(read_header(model)).shape
    shapes = HeadShapes(MEDUSA, n_embd, n_vocab, 4, 1, 0, False)
    write_heads(tmp_path / "h.gguf", shapes, model)
    with open_small(model, NO_DRAFTING) as plain:
        expected = answer(plain, PROMPT)
    with open_small(model, DraftSettings(model=tmp_path / "h.gguf", method=MEDUSA)) as runner:
        draft_always(runner, 4)
        drafted = answer(runner, PROMPT)
    assert ids(expected) == ids(drafted)
    assert drafted.n_drafted
