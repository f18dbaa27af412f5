"""Views of lazy tensors, each compared with an explicit loop, read whole and by rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quant.checkpoint import tensor_views
from quant.checkpoint.safetensors import LazyTensor

RANDOM = np.random.default_rng(5)
MATRIX = RANDOM.normal(size=(6, 4)).astype(np.float32)
STACK = RANDOM.normal(size=(3, 6, 4)).astype(np.float32)
VECTOR = RANDOM.normal(size=8).astype(np.float32)


def lazy(values: np.ndarray, name: str = "tensor") -> LazyTensor:
    """A tensor that lies in memory, F32, and complains of rows it has not."""
    lines = np.ascontiguousarray(values).reshape(-1, values.shape[-1]).view(np.uint8)

    def read(first: int, last: int) -> np.ndarray:
        assert 0 <= first < last <= len(lines), (first, last, len(lines))
        return lines[first:last]

    return LazyTensor(name, values.shape, "F32", Path("somewhere"), read)


def half(values: np.ndarray, name: str = "tensor") -> LazyTensor:
    """The same as F16: rows of another number of bytes."""
    tensor = lazy(values, name)
    lines = values.astype(np.float16).reshape(-1, values.shape[-1]).view(np.uint8)
    return replace(tensor, dtype="F16", read=lambda first, last: lines[first:last])


def values(tensor: LazyTensor) -> np.ndarray:
    """What a view reads, whole; the same must come row by row and in spans that start anywhere."""
    count = tensor_views.row_count(tensor)
    whole = tensor_views.read_floats(tensor)
    for first in range(count):
        for last in range(first + 1, count + 1):
            np.testing.assert_array_equal(
                tensor_views.read_floats(tensor, first, last), whole[first:last]
            )
    return whole.reshape(tensor.shape)


def loop(shape: tuple[int, ...], entry: Callable[..., float]) -> np.ndarray:
    """An array filled index by index."""
    filled = np.empty(shape, np.float32)
    for index in np.ndindex(*shape):
        filled[index] = entry(*index)
    return filled


def test_rows_of_a_matrix_in_another_order() -> None:
    order = [5, 0, 0, 3]
    picked = tensor_views.pick_rows(lazy(MATRIX), order)
    np.testing.assert_array_equal(
        values(picked), loop((4, 4), lambda row, at: MATRIX[order[row], at])
    )


@pytest.mark.parametrize(
    "order", [[7, 0, 2], [3, 1, 2, 0, 7, 6, 5, 4], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]
)
def test_values_of_a_vector_in_another_order(order: list[int]) -> None:
    picked = tensor_views.pick_rows(lazy(VECTOR), order)
    np.testing.assert_array_equal(values(picked), loop((len(order),), lambda at: VECTOR[order[at]]))


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 6, 2), (1, 6, 2), (0, 3, 1), (3, 6, 1), (2, 4, 1), (0, 6, 5)]
)
def test_part_of_the_rows_of_every_matrix(start: int, stop: int, step: int) -> None:
    chosen = range(start, stop, step)
    np.testing.assert_array_equal(
        values(tensor_views.pick_range(lazy(STACK), start, stop, step)),
        loop((3, len(chosen), 4), lambda matrix, row, at: STACK[matrix, start + row * step, at]),
    )
    np.testing.assert_array_equal(
        values(tensor_views.pick_range(lazy(MATRIX), start, stop, step)),
        loop((len(chosen), 4), lambda row, at: MATRIX[start + row * step, at]),
    )


def test_part_of_a_vector() -> None:
    np.testing.assert_array_equal(
        values(tensor_views.pick_range(lazy(VECTOR), 1, 8, 3)),
        loop((3,), lambda at: VECTOR[1 + 3 * at]),
    )


def test_matrices_in_a_stack() -> None:
    parts = [lazy(STACK[2]), lazy(STACK[0])]
    stacked = tensor_views.stack("both", parts)
    assert (stacked.name, stacked.shape) == ("both", (2, 6, 4))
    np.testing.assert_array_equal(
        values(stacked), loop((2, 6, 4), lambda i, row, at: STACK[(2, 0)[i], row, at])
    )


def test_matrices_one_below_the_other() -> None:
    joined = tensor_views.concatenate("both", [lazy(MATRIX), lazy(STACK[1, :2])])
    expected = loop((8, 4), lambda row, at: MATRIX[row, at] if row < 6 else STACK[1, row - 6, at])
    np.testing.assert_array_equal(values(joined), expected)


@pytest.mark.parametrize("made", [lazy, half])
def test_rows_and_columns_exchanged(made: Callable[[np.ndarray], LazyTensor]) -> None:
    source = made(STACK)
    stored = tensor_views.read_floats(source).reshape(STACK.shape)
    turned = tensor_views.transpose(source)
    assert turned.shape == (3, 4, 6)
    np.testing.assert_array_equal(
        values(turned), loop((3, 4, 6), lambda i, row, at: stored[i, at, row])
    )
    np.testing.assert_array_equal(values(tensor_views.transpose(turned)), stored)


def test_another_shape_of_the_same_rows() -> None:
    np.testing.assert_array_equal(
        values(tensor_views.reshape(lazy(STACK), 18, 4)), STACK.reshape(18, 4)
    )


@pytest.mark.parametrize("made", [lazy, half])
def test_norms_plus_one_are_f32(made: Callable[[np.ndarray], LazyTensor]) -> None:
    source = made(VECTOR)
    shifted = tensor_views.add_one(source)
    assert shifted.dtype == "F32"
    stored = tensor_views.read_floats(source)[0]
    np.testing.assert_array_equal(
        values(shifted), loop((8,), lambda at: np.float32(stored[at] + np.float32(1)))
    )


def test_every_second_value_of_every_row() -> None:
    chosen = tensor_views.pick_columns(lazy(STACK), 1, 2)
    np.testing.assert_array_equal(
        values(chosen), loop((3, 6, 2), lambda i, row, at: STACK[i, row, 1 + 2 * at])
    )
