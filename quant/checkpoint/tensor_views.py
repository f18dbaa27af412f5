"""Lazy tensors made from other lazy tensors: with reordered, selected or joined rows, stacked,
transposed, or with changed values.

Rows are read only when they are requested, and hardly more than these rows. So a model family can
rearrange a checkpoint of any size. Shapes are torch's, rows first. `LazyTensor.read` counts rows
over all axes but the last.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING

from quant.checkpoint.safetensors import LazyTensor
from quant.errors import UserError
from quant.native import ggml
from quant.source.source import reorder_rows

if TYPE_CHECKING:
    from quant.native.ggml import F32, U8

# Number of matrices, of all tensors together, that keep_matrices() caches. An expert's matrix has
# up to 170 MB.
MAX_KEPT_MATRICES = 2


def row_count(tensor: LazyTensor) -> int:
    """Return the number of a tensor's rows, counted over all axes but the last. A vector is one
    row.
    """
    return prod(tensor.shape[:-1])


def read_floats(tensor: LazyTensor, first: int = 0, last: int | None = None) -> "F32":
    """Return rows first .. last of a tensor as float32 `[rows, columns]`; by default all rows.
    Raises UserError for dtypes that ggml cannot decode.
    """
    last = row_count(tensor) if last is None else last
    if tensor.dtype not in ggml.TYPE_NUMBERS:
        raise UserError(
            f"tensor {tensor.name} is stored as {tensor.dtype}",
            hint="use the model it was made from",
        )
    return ggml.decode(tensor.read(first, last), tensor.dtype, tensor.shape[-1], label=tensor.name)


def map_values(tensor: LazyTensor, function: "Callable[[F32], F32]") -> LazyTensor:
    """Return an F32 tensor of the same shape, with the values that `function` returns for the
    tensor's values.

    `function` gets some of the rows as `[rows, columns]`, and returns values of the same number of
    rows.
    """
    return replace(
        tensor,
        dtype="F32",
        read=lambda first, last: _bytes(function(read_floats(tensor, first, last))),
    )


def add_one(tensor: LazyTensor) -> LazyTensor:
    """Return an F32 tensor with one added to every value. Gemma's checkpoints need this, because
    they store the weights of norms minus one.
    """
    return map_values(tensor, lambda values: values + 1)


def pick_rows(tensor: LazyTensor, order: Sequence[int]) -> LazyTensor:
    """Return a tensor with some rows of a matrix in a given order: row i of the result is row
    order[i] of `tensor`. The values of a vector are treated like rows.
    """
    if len(tensor.shape) == 1:
        return replace(
            map_values(tensor, lambda values: values[:, list(order)]), shape=(len(order),)
        )
    return replace(
        tensor, shape=(len(order), tensor.shape[-1]), read=reorder_rows(tensor.read, order)
    )


def pick_range(tensor: LazyTensor, start: int, stop: int, step: int = 1) -> LazyTensor:
    """Return a tensor with rows start, start + step, ... before `stop` of every matrix in a tensor
    `[..., rows, columns]`. The values of a vector are treated like rows.
    """
    picked = range(start, stop, step)
    if len(tensor.shape) == 1:
        return pick_rows(tensor, picked)
    height, count = tensor.shape[-2], len(picked)

    def read(first: int, last: int) -> "U8":
        row_numbers = [row // count * height + picked[row % count] for row in range(first, last)]
        return _read_rows(tensor, row_numbers)

    return replace(tensor, shape=(*tensor.shape[:-2], count, tensor.shape[-1]), read=read)


def pick_columns(tensor: LazyTensor, start: int, step: int) -> LazyTensor:
    """Return an F32 tensor with values start, start + step, ... of every row."""
    width = len(range(start, tensor.shape[-1], step))
    return replace(
        tensor,
        shape=(*tensor.shape[:-1], width),
        dtype="F32",
        read=lambda first, last: _bytes(read_floats(tensor, first, last)[:, start::step]),
    )


def pick_column_groups(tensor: LazyTensor, width: int, order: Sequence[int]) -> LazyTensor:
    """Return a tensor with the groups of `width` values of every row in a given order: group i of
    the result is group order[i] of `tensor`.

    The dtype stays the same if a group has whole blocks of it; otherwise the result is F32.
    """
    import numpy as np

    if width % ggml.block_size(tensor.dtype).values:
        tensor = map_values(tensor, lambda values: values)
    group_bytes = ggml.row_bytes(tensor.dtype, width)

    def read(first: int, last: int) -> "U8":
        rows = tensor.read(first, last)
        groups = rows.reshape(len(rows), -1, group_bytes)[:, list(order)]
        return np.ascontiguousarray(groups).reshape(len(rows), -1)

    return replace(tensor, shape=(*tensor.shape[:-1], len(order) * width), read=read)


def stack(name: str, tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return a tensor in which the given tensors, all of one shape, are stacked along a new first
    axis (the axis of experts).
    """
    assert tensors
    joined = concatenate(name, tensors)
    return replace(joined, shape=(len(tensors), *tensors[0].shape))


def concatenate(name: str, tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return a matrix with the rows of all given matrices, which have the same row length, in
    order.

    A vector counts as one row. If the dtypes differ, the result is F32.
    """
    assert len({tensor.shape[-1] for tensor in tensors}) == 1
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [map_values(tensor, lambda values: values) for tensor in tensors]
    bounds = list(accumulate((row_count(tensor) for tensor in tensors), initial=0))

    def read(first: int, last: int) -> "U8":
        import numpy as np

        pieces = [
            tensor.read(max(first, start) - start, min(last, stop) - start)
            for tensor, (start, stop) in zip(tensors, pairwise(bounds), strict=True)
            if start < last and first < stop
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return replace(tensors[0], name=name, shape=(bounds[-1], tensors[0].shape[-1]), read=read)


def reshape(tensor: LazyTensor, *shape: int) -> LazyTensor:
    """Return the tensor with a different shape. The number of values and the length of the last
    axis must stay the same, so that the rows do not change.
    """
    assert prod(shape) == prod(tensor.shape), (tensor.shape, shape)
    assert shape[-1] == tensor.shape[-1], (tensor.shape, shape)
    return replace(tensor, shape=shape)


def split_vector(tensor: LazyTensor, count: int) -> LazyTensor:
    """Return an F32 matrix with the values of a vector in `count` rows of equal length."""
    width = tensor.shape[0] // count
    assert tensor.shape == (count * width,), (tensor.shape, count)

    def read(first: int, last: int) -> "U8":
        return _bytes(read_floats(tensor).reshape(count, width)[first:last])

    return replace(tensor, shape=(count, width), dtype="F32", read=read)


def transpose(tensor: LazyTensor) -> LazyTensor:
    """Return the tensor with its last two axes exchanged, as F32 if it is stored in blocks. To
    return any rows of the result, read() reads the whole matrix to which they belong.
    """
    if tensor.dtype in ggml.TYPE_NUMBERS and ggml.is_quantized(tensor.dtype):
        tensor = map_values(tensor, lambda values: values)
    height, width = tensor.shape[-2:]

    def read(first: int, last: int) -> "U8":
        import numpy as np

        pieces = []
        for matrix in range(first // width, -(-last // width)):
            stored = tensor.read(matrix * height, (matrix + 1) * height)
            exchanged = np.swapaxes(stored.reshape(height, width, -1), 0, 1).reshape(width, -1)
            pieces.append(exchanged[max(first - matrix * width, 0) : last - matrix * width])
        return np.ascontiguousarray(np.concatenate(pieces))

    return replace(tensor, shape=(*tensor.shape[:-2], width, height), read=read)


def keep_matrices(tensor: LazyTensor) -> LazyTensor:
    """Return the same tensor with a read() that reads whole matrices and caches the last ones. Use
    it for tensors such as those of transpose(), of which a few rows are as slow to read as the
    whole matrix.
    """
    height, lock = tensor.shape[-2], threading.Lock()

    def read(first: int, last: int) -> "U8":
        import numpy as np

        pieces = []
        for matrix in range(first // height, -(-last // height)):
            with lock:  # so that threads that need the same matrix do not read it twice
                rows = _read_matrix(tensor, matrix)
            pieces.append(rows[max(first - matrix * height, 0) : last - matrix * height])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return replace(tensor, read=read)


@lru_cache(maxsize=MAX_KEPT_MATRICES)
def _read_matrix(tensor: LazyTensor, matrix: int) -> "U8":
    """Return the rows of one matrix of a tensor. The results for all tensors share one cache."""
    height = tensor.shape[-2]
    return tensor.read(matrix * height, (matrix + 1) * height)


def _read_rows(tensor: LazyTensor, row_numbers: list[int]) -> "U8":
    """Return the rows with these numbers, in this order. Rows at most four apart are read in one
    call, and the rows between them are discarded.
    """
    import numpy as np

    pieces, start = [], 0
    for index in range(1, len(row_numbers) + 1):
        if index == len(row_numbers) or not 0 < row_numbers[index] - row_numbers[index - 1] <= 4:
            span = row_numbers[start:index]
            data = tensor.read(span[0], span[-1] + 1)
            pieces.append(data if len(data) == len(span) else data[[row - span[0] for row in span]])
            start = index
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _bytes(values: "F32") -> "U8":
    import numpy as np

    return np.ascontiguousarray(values, np.float32).view(np.uint8)
