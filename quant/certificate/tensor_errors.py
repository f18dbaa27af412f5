"""Relative RMS error of every tensor of a finished file against its source, over all values.

Both files are read and decoded by ggml's own routines, so that the errors are those of the bytes in
the file. Columns are weighted by their importance if the tensor has one.
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

# values of a tensor in memory at a time, as floats of the source and of the file
SLAB_VALUES = 1 << 22
PIECE_VALUES = 1 << 18  # values in a job of one thread


@dataclass(frozen=True, slots=True)
class OriginalTensor:
    """A tensor of the source, and a function that returns the importance of its rows first .. last."""

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
    """Sums of squares of the source and of the differences, plain and weighted."""

    signal: float = 0.0
    noise: float = 0.0
    weighed_signal: float = 0.0
    weighed_noise: float = 0.0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.signal + other.signal,
            self.noise + other.noise,
            self.weighed_signal + other.weighed_signal,
            self.weighed_noise + other.weighed_noise,
        )


def tensor_errors(
    originals: Mapping[str, OriginalTensor],
    header: ModelHeader,
    threads: int,
    on_tensor: Callable[[int], None] = lambda count: None,
) -> Iterator[TensorError]:
    """Yield the error of every tensor of the file in order, compared with the original of the same
    name. `on_tensor` is called with 1 after each tensor.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="deviate") as pool:
        for tensor in header.tensors:
            yield _tensor_error(originals[tensor.name], tensor, pool)
            on_tensor(1)


def _tensor_error(
    original: OriginalTensor, tensor: TensorInfo, pool: ThreadPoolExecutor
) -> TensorError:
    weight = original.weight
    if not (ggml.is_decodable(weight.type) and ggml.is_decodable(tensor.type)):
        return TensorError(tensor.name, None, None)
    read = make_file_row_reader(
        tensor.file, tensor.offset, ggml.row_bytes(tensor.type, tensor.columns), tensor.name
    )
    total, weighed = _Sums(), False
    step, part = max(1, SLAB_VALUES // weight.columns), max(1, PIECE_VALUES // weight.columns)
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        source, blocks, importance = (
            weight.read(first, last),
            read(first, last),
            original.importance(first, last),
        )
        weighed = weighed or importance is not None
        jobs = [
            pool.submit(
                _square_sums,
                original,
                tensor,
                source[at:end],
                blocks[at:end],
                importance.after(at) if importance else None,
            )
            for at in range(0, last - first, part)
            for end in (min(at + part, last - first),)
        ]
        for job in jobs:
            total += job.result()
    error = relative_rms(total.noise, total.signal)
    return TensorError(
        tensor.name,
        error,
        relative_rms(total.weighed_noise, total.weighed_signal) if weighed else None,
    )


def _square_sums(
    original: OriginalTensor,
    tensor: TensorInfo,
    source: "U8",
    blocks: "U8",
    importance: ggml.Importance | None,
) -> _Sums:
    """Return the sums of squares of some rows."""
    import numpy as np

    name, columns = tensor.name, tensor.columns
    exact = ggml.decode(source, original.weight.type, columns, label=name)
    difference = np.subtract(ggml.decode(blocks, tensor.type, columns, label=name), exact)
    total = _Sums(sum_of_squares(exact), sum_of_squares(difference))
    if importance is None:
        return total
    for first, last, vector in importance.spans(0, len(exact)):
        weigh = vector.astype(np.float64)
        signal, noise = (
            np.square(rows[first:last], dtype=np.float64).sum(0) @ weigh
            for rows in (exact, difference)
        )
        total += _Sums(0.0, 0.0, float(signal), float(noise))
    return total
