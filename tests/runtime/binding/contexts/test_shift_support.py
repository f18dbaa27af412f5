"""Cells are shifted only in caches in which llama.cpp neither aborts nor damages the keys."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kv_state.positions import window_survives_shift
from llmcli.runtime.binding.kv_state.shared_cells import SharedCells
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from tests.quant import tiny_gguf

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


def can_shift_cells(path: Path, **kinds: Any) -> bool:
    options = ContextOptions(256, 32, 32, 1, **kinds)
    with open_model(path) as model, open_context(model, options) as context:
        return context.can_shift


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0", "iq4_nl"])
def test_keys_that_are_rotated_as_a_whole_can_be_shifted(kind: str, tmp_path: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=2)
    assert can_shift_cells(path, type_k=kind, type_v=kind)


def test_a_model_with_a_sliding_window_can_be_shifted(tmp_path: Path) -> None:
    assert can_shift_cells(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=6))


@pytest.mark.parametrize(
    ("arch", "settings"),
    [("llama", YARN), ("llama", {"rope.scaling.attn_factor": 1.5}), ("smollm3", {})],
    ids=["yarn", "an attention factor", "layers without positions"],
)
def test_the_trial_finds_keys_that_a_shift_damages(
    arch: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert not can_shift_cells(
        tiny_gguf.llama(tmp_path / "m.gguf", arch=arch, layers=4, settings=settings)
    )


def test_caches_that_ggml_would_abort_on_are_refused(tmp_path: Path) -> None:
    partial_rotation = tiny_gguf.gemma3(
        tmp_path / "partial_rotation.gguf",
        hidden=256,
        layers=6,
        settings={"rope.dimension_count": 32},
    )
    assert can_shift_cells(partial_rotation)
    assert not can_shift_cells(partial_rotation, type_k="q8_0", type_v="q8_0")
    assert not can_shift_cells(partial_rotation, type_k="bf16", type_v="bf16")
    assert not can_shift_cells(
        tiny_gguf.gemma3(tmp_path / "windows.gguf", hidden=128, layers=2)
    )  # no dense layer
    without_rope = {"rope.scaling.finetuned": False, "logit_scale": 1.0}
    assert not can_shift_cells(
        tiny_gguf.llama(
            tmp_path / "without_rope.gguf", arch="granite", layers=2, settings=without_rope
        )
    )


def test_recurrent_state_cannot_be_shifted(tmp_path: Path) -> None:
    path = tiny_gguf.mamba(tmp_path / "m.gguf")
    with open_model(path) as model, open_context(model, ContextOptions(256, 32, 32, 1)) as context:
        decode(context, [5, 6, 7, 8])
        assert model.is_recurrent and not context.can_shift
        with pytest.raises(AssertionError):
            context.shift(0, 1, 2, 8)
        assert context.last_position(0) == 3


def decode(context: Context, tokens: list[int], sequence: int = 0) -> np.ndarray:
    """Return the logits after `tokens`, which continue the sequence."""
    start = context.last_position(sequence) + 1
    wants = [False] * (len(tokens) - 1) + [True]
    rows = BatchRows(tokens, range(start, start + len(tokens)), [sequence] * len(tokens), wants)
    return np.array(context.decode(rows)[0].logits)


def test_an_interrupt_waits_until_the_shift_is_complete(stories_gguf: Path) -> None:
    """A pass that is stopped while it rotates keys would leave the keys of some layers rotated and
    those of others not.
    """
    options = ContextOptions(256, 32, 32, 1, 1, 1, "f32", "f32", "off")
    with open_model(stories_gguf) as model, open_context(model, options) as context:
        found = []
        for is_interrupted in (False, True):
            context.clear()
            decode(context, [5, 6, 7, 8, 9, 10, 11, 12])
            if is_interrupted:
                context.interrupt()
            context.shift(0, 2, 5, 12)
            assert (context.first_position(0), context.last_position(0)) == (0, 4)
            context.stop.reset()  # otherwise the request would stop the next pass
            found.append(decode(context, [13]))
        np.testing.assert_array_equal(*found)


def test_shared_cells_are_not_moved_and_the_other_sequence_is_unchanged(stories_gguf: Path) -> None:
    options = ContextOptions(256, 32, 32, 2, 1, 1, "f32", "f32", "off")
    with open_model(stories_gguf) as model, open_context(model, options) as context:
        decode(context, [5, 6, 7, 8])
        context.copy(0, 1, 0, 3)
        decode(context, [20, 21, 22], 0)
        for start, end in ((0, 1), (0, 2), (1, 2)):
            with pytest.raises(AssertionError, match="another sequence"):
                context.shift(0, start, end, 22)
        context.shift(0, 1, 4, 22)
        assert [context.last_position(sequence) for sequence in (0, 1)] == [3, 2]
        logits = decode(context, [9], 1)
        context.clear()
        np.testing.assert_allclose(logits, decode(context, [5, 6, 7, 9]), atol=1e-4)


def test_a_window_smaller_than_the_context_cannot_be_shifted(tmp_path: Path) -> None:
    """llama.cpp moves the cells of window layers only if they have as many cells as the other
    layers.
    """
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=6)
    with (
        open_model(path) as model,
        open_context(model, ContextOptions(1024, 128, 16, 1)) as context,
    ):
        assert not context.can_shift
    with open_model(path) as model, open_context(model, ContextOptions(256, 128, 16, 1)) as context:
        assert context.can_shift


@pytest.mark.parametrize(
    ("first", "start", "end", "survives"),
    [
        (0, 10, 90, True),
        (0, 10, 99, True),
        (70, 10, 80, True),
        (70, 10, 85, False),
        (70, 75, 80, True),
        (70, 75, 99, False),
        (4, 10, 84, True),
    ],
)
def test_a_window_survives_a_shift_only_if_it_stays_complete(
    first: int, start: int, end: int, survives: bool
) -> None:
    assert window_survives_shift(first, start, end, 100, 16) is survives
    assert window_survives_shift(first, start, end, 100, 0)


def test_shared_cells_are_derived_from_copies_and_cuts() -> None:
    shared_cells = SharedCells()
    shared_cells.record_copy(0, 1, 0, 10)
    shared_cells.record_copy(1, 2, 0, 6)
    assert [shared_cells.shared_end(sequence) for sequence in range(4)] == [10, 10, 6, 0]
    shared_cells.record_cut(1, 3)
    assert [shared_cells.shared_end(sequence) for sequence in range(4)] == [
        6,
        3,
        6,
        0,
    ]  # 0 and 2 still share what 1 had from 0
    shared_cells.record_cut(2, 0)
    assert [shared_cells.shared_end(sequence) for sequence in range(3)] == [3, 3, 0]
    shared_cells.record_cut(0, 0)
    assert [shared_cells.shared_end(sequence) for sequence in range(3)] == [0, 0, 0]
