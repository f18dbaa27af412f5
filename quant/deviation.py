"""How far every tensor of a finished file is from what it was made of: relative RMS over all of its
values.

Both files are read back and decoded by ggml's own routines, so it speaks of the bytes that are
there and not of what was meant. Columns are weighed by the importances where the plan has some. It
knows plans and files, no models.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant import native
from quant.apart import relative, squares
from quant.container import Header, TensorInfo
from quant.source import Weight, stored_rows

if TYPE_CHECKING:
    from quant.native import U8

SLAB = 1 << 22  # values of a tensor that are alive at a time, twice as floats
PIECE = 1 << 18  # values a thread takes


@dataclass(frozen=True, slots=True)
class Original:
    """One tensor of the source, and how the columns of its rows first .. last are weighed."""

    weight: Weight
    weigh: Callable[[int, int], native.Importance | None]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Relative RMS of a tensor's values; `weighted`: with its importances. None where it cannot be
    told.
    """

    name: str
    error: float | None
    weighted: float | None


@dataclass(frozen=True, slots=True)
class _Sums:
    """Squares of the source and of the difference, plain and weighed."""

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


def deviations(
    originals: Mapping[str, Original],
    header: Header,
    threads: int,
    tick: Callable[[int], None] = lambda count: None,
) -> Iterator[Deviation]:
    """Every tensor of the file in its order, each held against its original, by name. `tick` is
    told each.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="deviate") as pool:
        for tensor in header.tensors:
            yield _deviation(originals[tensor.name], tensor, pool)
            tick(1)


def _deviation(original: Original, tensor: TensorInfo, pool: ThreadPoolExecutor) -> Deviation:
    weight = original.weight
    if not (native.decodable(weight.type) and native.decodable(tensor.type)):
        return Deviation(tensor.name, None, None)
    read = stored_rows(
        tensor.file, tensor.offset, native.row_bytes(tensor.type, tensor.columns), tensor.name
    )
    total, weighed = _Sums(), False
    step, part = max(1, SLAB // weight.columns), max(1, PIECE // weight.columns)
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        source, made, by = weight.read(first, last), read(first, last), original.weigh(first, last)
        weighed = weighed or by is not None
        jobs = [
            pool.submit(
                _sums, original, tensor, source[at:end], made[at:end], by.behind(at) if by else None
            )
            for at in range(0, last - first, part)
            for end in (min(at + part, last - first),)
        ]
        for job in jobs:
            total += job.result()
    error = relative(total.noise, total.signal)
    return Deviation(
        tensor.name, error, relative(total.weighed_noise, total.weighed_signal) if weighed else None
    )


def _sums(
    original: Original, tensor: TensorInfo, source: "U8", made: "U8", by: native.Importance | None
) -> _Sums:
    """The squares of some rows."""
    import numpy as np

    name, columns = tensor.name, tensor.columns
    ours = native.decode(source, original.weight.type, columns, label=name)
    apart = np.subtract(native.decode(made, tensor.type, columns, label=name), ours)
    total = _Sums(squares(ours), squares(apart))
    if by is None:
        return total
    for first, last, vector in by.spans(0, len(ours)):
        weigh = vector.astype(np.float64)
        one, other = (
            np.square(rows[first:last], dtype=np.float64).sum(0) @ weigh for rows in (ours, apart)
        )
        total += _Sums(0.0, 0.0, float(one), float(other))
    return total
