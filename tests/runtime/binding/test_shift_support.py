"""Which caches can be shifted: a refusal where llama.cpp would abort or damage the keys."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.binding.positions import window_survives_shift
from llmcli.runtime.binding.shared_cells import SharedCells
from tests.quant import tiny_gguf

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


def movable(path: Path, **kinds: Any) -> bool:
    options = ContextOptions(256, 32, 32, 1, **kinds)
    with open_model(path) as model, open_context(model, options) as context:
        return context.can_shift


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0", "iq4_nl"])
def test_keys_that_turn_as_one_may_be_moved(kind: str, tmp_path: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=2)
    assert movable(path, type_k=kind, type_v=kind)


def test_a_sliding_window_may_be_moved(tmp_path: Path) -> None:
    assert movable(tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=6))


@pytest.mark.parametrize(
    ("arch", "settings"),
    [("llama", YARN), ("llama", {"rope.scaling.attn_factor": 1.5}), ("smollm3", {})],
    ids=["yarn", "an attention factor", "layers without positions"],
)
def test_keys_that_turning_spoils_are_found_out(
    arch: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert not movable(tiny_gguf.llama(tmp_path / "m.gguf", arch=arch, layers=4, settings=settings))


def test_what_ggml_would_abort_on_is_refused(tmp_path: Path) -> None:
    half = tiny_gguf.gemma3(
        tmp_path / "half.gguf", hidden=256, layers=6, settings={"rope.dimension_count": 32}
    )
    assert movable(half)
    assert not movable(half, type_k="q8_0", type_v="q8_0")
    assert not movable(half, type_k="bf16", type_v="bf16")
    assert not movable(
        tiny_gguf.gemma3(tmp_path / "windows.gguf", hidden=128, layers=2)
    )  # no dense layer
    silent = {"rope.scaling.finetuned": False, "logit_scale": 1.0}
    assert not movable(
        tiny_gguf.llama(tmp_path / "silent.gguf", arch="granite", layers=2, settings=silent)
    )


def test_recurrent_state_is_not_moved(tmp_path: Path) -> None:
    path = tiny_gguf.mamba(tmp_path / "m.gguf")
    with open_model(path) as model, open_context(model, ContextOptions(256, 32, 32, 1)) as context:
        decode(context, [5, 6, 7, 8])
        assert model.is_recurrent and not context.can_shift
        with pytest.raises(AssertionError):
            context.shift(0, 1, 2, 8)
        assert context.last_position(0) == 3


def decode(context: Context, tokens: list[int], sequence: int = 0) -> np.ndarray:
    start = context.last_position(sequence) + 1
    wants = [False] * (len(tokens) - 1) + [True]
    rows = BatchRows(tokens, range(start, start + len(tokens)), [sequence] * len(tokens), wants)
    return np.array(context.decode(rows)[0].logits)


def test_an_interruption_waits_until_the_keys_are_turned(stories_gguf: Path) -> None:
    """A pass that is stopped while keys are turned leaves some layers turned and others not."""
    options = ContextOptions(256, 32, 32, 1, 1, 1, "f32", "f32", "off")
    with open_model(stories_gguf) as model, open_context(model, options) as context:
        found = []
        for stopped in (False, True):
            context.clear()
            decode(context, [5, 6, 7, 8, 9, 10, 11, 12])
            if stopped:
                context.interrupt()
            context.shift(0, 2, 5, 12)
            assert (context.first_position(0), context.last_position(0)) == (0, 4)
            context.stop.reset()  # the pass that comes next would have been stopped
            found.append(decode(context, [13]))
        np.testing.assert_array_equal(*found)


def test_shared_cells_stay_and_the_others_keep_their_text(stories_gguf: Path) -> None:
    options = ContextOptions(256, 32, 32, 2, 1, 1, "f32", "f32", "off")
    with open_model(stories_gguf) as model, open_context(model, options) as context:
        decode(context, [5, 6, 7, 8])
        context.copy(0, 1, 0, 3)
        decode(context, [20, 21, 22], 0)
        for start, end in ((0, 1), (0, 2), (1, 2)):
            with pytest.raises(AssertionError, match="another sequence"):
                context.shift(0, start, end, 22)
        context.shift(0, 1, 4, 22)
        assert [context.last_position(one) for one in (0, 1)] == [3, 2]
        got = decode(context, [9], 1)
        context.clear()
        np.testing.assert_allclose(got, decode(context, [5, 6, 7, 9]), atol=1e-4)


def test_a_window_that_is_smaller_than_the_context_is_not_moved(tmp_path: Path) -> None:
    """llama.cpp moves window layers where they have as many cells as the dense ones."""
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=6)
    with (
        open_model(path) as model,
        open_context(model, ContextOptions(1024, 128, 16, 1)) as context,
    ):
        assert not context.can_shift
    with open_model(path) as model, open_context(model, ContextOptions(256, 128, 16, 1)) as context:
        assert context.can_shift


@pytest.mark.parametrize(
    ("first", "start", "end", "whole"),
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
def test_a_window_that_has_moved_on_moves_whole_or_not_at_all(
    first: int, start: int, end: int, whole: bool
) -> None:
    assert window_survives_shift(first, start, end, 100, 16) is whole
    assert window_survives_shift(first, start, end, 100, 0)


def test_who_shares_what_is_known_from_copies_and_cuts() -> None:
    sharing = SharedCells()
    sharing.record_copy(0, 1, 0, 10)
    sharing.record_copy(1, 2, 0, 6)
    assert [sharing.shared_end(one) for one in range(4)] == [10, 10, 6, 0]
    sharing.record_cut(1, 3)
    assert [sharing.shared_end(one) for one in range(4)] == [
        6,
        3,
        6,
        0,
    ]  # 0 and 2 still share what 1 had from 0
    sharing.record_cut(2, 0)
    assert [sharing.shared_end(one) for one in range(3)] == [3, 3, 0]
    sharing.record_cut(0, 0)
    assert [sharing.shared_end(one) for one in range(3)] == [0, 0, 0]
