"""Views of lazy tensors, compared with explicit loops, read at once and in spans of rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quant.checkpoint import tensor_views
from quant.checkpoint.safetensors import LazyTensor
from quant.native import ggml

RANDOM = np.random.default_rng(5)
MATRIX = RANDOM.normal(size=(6, 4)).astype(np.float32)
STACK = RANDOM.normal(size=(3, 6, 4)).astype(np.float32)
VECTOR = RANDOM.normal(size=8).astype(np.float32)


def lazy(values: np.ndarray, name: str = "tensor") -> LazyTensor:
    """Return a lazy F32 tensor over an array. Its `read` asserts that the rows exist."""
    lines = np.ascontiguousarray(values).reshape(-1, values.shape[-1]).view(np.uint8)

    def read(first: int, last: int) -> np.ndarray:
        assert 0 <= first < last <= len(lines), (first, last, len(lines))
        return lines[first:last]

    return LazyTensor(name, values.shape, "F32", Path("somewhere"), read)


def half(values: np.ndarray, name: str = "tensor") -> LazyTensor:
    """Return a lazy F16 tensor over an array, rounded to F16."""
    tensor = lazy(values, name)
    lines = values.astype(np.float16).reshape(-1, values.shape[-1]).view(np.uint8)
    return replace(tensor, dtype="F16", read=lambda first, last: lines[first:last])


def quantized(values: np.ndarray) -> LazyTensor:
    """Return a lazy Q8_0 tensor over an array."""
    lines = ggml.encode(values, "Q8_0", label="tensor")
    return replace(lazy(values), dtype="Q8_0", read=lambda first, last: lines[first:last])


def values(tensor: LazyTensor) -> np.ndarray:
    """Return the floats of a tensor, and assert that every span of rows reads the same floats."""
    count = tensor_views.row_count(tensor)
    floats = tensor_views.read_floats(tensor)
    for first in range(count):
        for last in range(first + 1, count + 1):
            np.testing.assert_array_equal(
                tensor_views.read_floats(tensor, first, last), floats[first:last]
            )
    return floats.reshape(tensor.shape)


def fill_by_index(shape: tuple[int, ...], entry: Callable[..., float]) -> np.ndarray:
    """Return an array of this shape with the value `entry(*index)` at every index."""
    filled = np.empty(shape, np.float32)
    for index in np.ndindex(*shape):
        filled[index] = entry(*index)
    return filled


def test_pick_rows_reorders_a_matrix() -> None:
    order = [5, 0, 0, 3]
    picked = tensor_views.pick_rows(lazy(MATRIX), order)
    np.testing.assert_array_equal(
        values(picked), fill_by_index((4, 4), lambda row, column: MATRIX[order[row], column])
    )


@pytest.mark.parametrize(
    "order", [[7, 0, 2], [3, 1, 2, 0, 7, 6, 5, 4], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]
)
def test_pick_rows_reorders_a_vector(order: list[int]) -> None:
    picked = tensor_views.pick_rows(lazy(VECTOR), order)
    np.testing.assert_array_equal(
        values(picked), fill_by_index((len(order),), lambda column: VECTOR[order[column]])
    )


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 6, 2), (1, 6, 2), (0, 3, 1), (3, 6, 1), (2, 4, 1), (0, 6, 5)]
)
def test_pick_range_selects_rows_of_every_matrix(start: int, stop: int, step: int) -> None:
    chosen = range(start, stop, step)
    np.testing.assert_array_equal(
        values(tensor_views.pick_range(lazy(STACK), start, stop, step)),
        fill_by_index(
            (3, len(chosen), 4),
            lambda matrix, row, column: STACK[matrix, start + row * step, column],
        ),
    )
    np.testing.assert_array_equal(
        values(tensor_views.pick_range(lazy(MATRIX), start, stop, step)),
        fill_by_index((len(chosen), 4), lambda row, column: MATRIX[start + row * step, column]),
    )


def test_pick_range_selects_values_of_a_vector() -> None:
    np.testing.assert_array_equal(
        values(tensor_views.pick_range(lazy(VECTOR), 1, 8, 3)),
        fill_by_index((3,), lambda column: VECTOR[1 + 3 * column]),
    )


def test_stack_of_matrices() -> None:
    parts = [lazy(STACK[2]), lazy(STACK[0])]
    stacked = tensor_views.stack("both", parts)
    assert (stacked.name, stacked.shape) == ("both", (2, 6, 4))
    np.testing.assert_array_equal(
        values(stacked),
        fill_by_index((2, 6, 4), lambda i, row, column: STACK[(2, 0)[i], row, column]),
    )


def test_concatenated_matrices() -> None:
    joined = tensor_views.concatenate("both", [lazy(MATRIX), lazy(STACK[1, :2])])
    expected = fill_by_index(
        (8, 4), lambda row, column: MATRIX[row, column] if row < 6 else STACK[1, row - 6, column]
    )
    np.testing.assert_array_equal(values(joined), expected)


@pytest.mark.parametrize("make_tensor", [lazy, half])
def test_transpose(make_tensor: Callable[[np.ndarray], LazyTensor]) -> None:
    source = make_tensor(STACK)
    stored = tensor_views.read_floats(source).reshape(STACK.shape)
    transposed = tensor_views.transpose(source)
    assert transposed.shape == (3, 4, 6)
    np.testing.assert_array_equal(
        values(transposed), fill_by_index((3, 4, 6), lambda i, row, column: stored[i, column, row])
    )
    np.testing.assert_array_equal(values(tensor_views.transpose(transposed)), stored)


def test_transpose_of_blocks_gives_f32() -> None:
    stored = np.random.default_rng(0).integers(-4, 5, (2, 3, 32)).astype(np.float32)
    blocks = ggml.encode(stored.reshape(6, 32), "Q8_0", label="x").reshape(6, -1)
    source = LazyTensor("x", (2, 3, 32), "Q8_0", Path("x"), lambda i, j: blocks[i:j])
    transposed = tensor_views.transpose(source)
    assert (transposed.dtype, transposed.shape) == ("F32", (2, 32, 3))
    expected = ggml.decode(blocks, "Q8_0", 32, label="x").reshape(2, 3, 32).swapaxes(1, 2)
    np.testing.assert_array_equal(values(transposed), expected)


def test_reshape() -> None:
    np.testing.assert_array_equal(
        values(tensor_views.reshape(lazy(STACK), 18, 4)), STACK.reshape(18, 4)
    )


@pytest.mark.parametrize("make_tensor", [lazy, half])
def test_add_one_gives_f32(make_tensor: Callable[[np.ndarray], LazyTensor]) -> None:
    source = make_tensor(VECTOR)
    shifted = tensor_views.add_one(source)
    assert shifted.dtype == "F32"
    stored = tensor_views.read_floats(source)[0]
    np.testing.assert_array_equal(
        values(shifted),
        fill_by_index((8,), lambda column: np.float32(stored[column] + np.float32(1))),
    )


def test_pick_columns_selects_every_second_value() -> None:
    chosen = tensor_views.pick_columns(lazy(STACK), 1, 2)
    np.testing.assert_array_equal(
        values(chosen),
        fill_by_index((3, 6, 2), lambda i, row, column: STACK[i, row, 1 + 2 * column]),
    )


def test_pick_column_groups_reorders_groups_and_keeps_whole_blocks() -> None:
    wide = RANDOM.normal(size=(3, 96)).astype(np.float32)
    for tensor, width, dtype in (
        (lazy(wide), 32, "F32"),
        (half(wide), 32, "F16"),
        (half(wide), 2, "F16"),
        (quantized(wide), 32, "Q8_0"),
        (quantized(wide), 16, "F32"),
    ):
        order = list(reversed(range(96 // width)))
        moved = tensor_views.pick_column_groups(tensor, width, order)
        assert moved.dtype == dtype
        stored = values(tensor)
        expected = fill_by_index(
            wide.shape,
            lambda row, column, w=width, o=order, s=stored: s[row, o[column // w] * w + column % w],
        )
        np.testing.assert_array_equal(values(moved), expected)


def test_split_vector_makes_rows_of_equal_length() -> None:
    for count in (1, 2, 8):
        rows = values(tensor_views.split_vector(half(VECTOR), count))
        expected = fill_by_index(
            (count, 8 // count),
            lambda row, column, width=8 // count: np.float16(VECTOR[row * width + column]),
        )
        np.testing.assert_array_equal(rows, expected)


def test_kept_matrices_are_read_once_if_their_rows_are_read_in_order() -> None:
    reads = []
    plain = lazy(STACK)

    def read(first: int, last: int) -> np.ndarray:
        reads.append((first, last))
        return plain.read(first, last)

    kept = tensor_views.keep_matrices(replace(plain, read=read))
    rows = [kept.read(row, row + 1) for row in range(tensor_views.row_count(kept))]
    np.testing.assert_array_equal(np.concatenate(rows), plain.read(0, 18))
    assert reads == [(0, 6), (6, 12), (12, 18)]
    np.testing.assert_array_equal(values(kept), STACK)
