"""Relative RMS error of every tensor of a finished file, compared with its source over all values.

Both files are read from disk and decoded by ggml's own routines, so that the errors are those of
the bytes in the file. Errors are also computed with columns weighted by their importance, for
tensors that have an importance.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.gguf.header import TensorInfo
from quant.model_file.model_header import ModelHeader
from quant.native import ggml
from quant.relative_error import relative_rms, sum_of_squares
from quant.source.source import Weight, make_file_row_reader

if TYPE_CHECKING:
    from quant.native.ggml import U8

# number of a tensor's values that are in memory at a time, as floats of the source and of the file
SLAB_VALUES = 1 << 22
PIECE_VALUES = 1 << 18  # number of values that one job of a thread compares


@dataclass(frozen=True, slots=True)
class OriginalTensor:
    """A tensor of the source. `importance` is a function that returns the importance of the columns
    for rows first .. last, or None.
    """

    weight: Weight
    importance: Callable[[int, int], ggml.Importance | None]


@dataclass(frozen=True, slots=True)
class TensorError:
    """The relative RMS error of a tensor's values: `error`, and `weighted` with columns weighted by
    importance. Each is None if it cannot be computed.
    """

    name: str
    error: float | None
    weighted: float | None


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of squares over some values: of the source (`signal`) and of the differences from the
    source (`noise`), both also with columns weighted by importance.
    """

    signal: float = 0.0
    noise: float = 0.0
    weighted_signal: float = 0.0
    weighted_noise: float = 0.0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.signal + other.signal,
            self.noise + other.noise,
            self.weighted_signal + other.weighted_signal,
            self.weighted_noise + other.weighted_noise,
        )


def tensor_errors(
    originals: Mapping[str, OriginalTensor],
    header: ModelHeader,
    threads: int,
    on_tensor: Callable[[int], None] = lambda count: None,
) -> Iterator[TensorError]:
    """Yield the error of each tensor of the file, in order. `originals` are the source's tensors by
    name. `on_tensor` is called with 1 after each tensor.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="deviate") as pool:
        for tensor in header.tensors:
            yield _tensor_error(originals[tensor.name], tensor, pool)
            on_tensor(1)


def _tensor_error(
    original: OriginalTensor, tensor: TensorInfo, pool: ThreadPoolExecutor
) -> TensorError:
    """Return the error of one tensor, computed in slabs of rows that the threads of `pool` share.
    Its errors are None if ggml cannot decode one of the two types.
    """
    weight = original.weight
    if not (ggml.is_decodable(weight.type) and ggml.is_decodable(tensor.type)):
        return TensorError(tensor.name, None, None)
    read = make_file_row_reader(
        tensor.file, tensor.offset, ggml.row_bytes(tensor.type, tensor.columns), tensor.name
    )
    total, is_weighted = _Sums(), False
    slab_rows = max(1, SLAB_VALUES // weight.columns)
    piece_rows = max(1, PIECE_VALUES // weight.columns)
    for first in range(0, weight.rows, slab_rows):
        last = min(first + slab_rows, weight.rows)
        source, blocks, importance = (
            weight.read(first, last),
            read(first, last),
            original.importance(first, last),
        )
        is_weighted = is_weighted or importance is not None
        jobs = [
            pool.submit(
                _square_sums,
                original,
                tensor,
                source[at:end],
                blocks[at:end],
                importance.after(at) if importance else None,
            )
            for at in range(0, last - first, piece_rows)
            for end in (min(at + piece_rows, last - first),)
        ]
        for job in jobs:
            total += job.result()
    error = relative_rms(total.noise, total.signal)
    return TensorError(
        tensor.name,
        error,
        relative_rms(total.weighted_noise, total.weighted_signal) if is_weighted else None,
    )


def _square_sums(
    original: OriginalTensor,
    tensor: TensorInfo,
    source: "U8",
    blocks: "U8",
    importance: ggml.Importance | None,
) -> _Sums:
    """Return the sums of squares for some rows, given as the stored bytes of the source and of the
    file (`blocks`). Without `importance`, the weighted sums are 0.
    """
    import numpy as np

    name, columns = tensor.name, tensor.columns
    exact = ggml.decode(source, original.weight.type, columns, label=name)
    difference = np.subtract(ggml.decode(blocks, tensor.type, columns, label=name), exact)
    total = _Sums(sum_of_squares(exact), sum_of_squares(difference))
    if importance is None:
        return total
    for first, last, vector in importance.spans(0, len(exact)):
        column_weights = vector.astype(np.float64)
        signal, noise = (
            np.square(rows[first:last], dtype=np.float64).sum(0) @ column_weights
            for rows in (exact, difference)
        )
        total += _Sums(0.0, 0.0, float(signal), float(noise))
    return total
