"""Collection of second moments: finds out which weights share an input and how many inputs fit into
memory at a time, and computes the sums.

Rows are multiplied in float32, once for each distinct input, and the products are added in float64.
Only the lower triangle is computed, as squares along the diagonal and rectangles below them. Rows
are stored until several whole chunks have been read, because larger products are faster. While
llama.cpp waits for the callback that observes its products, rows are only copied; squares and
mixtures are computed later.

Each product runs on one thread, because BLAS's own threads busy-wait like llama.cpp's and would
take time from them. If torch has a GPU, it computes the products, of more rows at a time.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.calibration.attention_moments import ChunkMixing, MixedRows, select_queries
from quant.calibration.expected_moments import mixing_product
from quant.calibration.imatrix_collector import (
    F32,
    F64,
    AttentionMixture,
    ImatrixCollector,
    WeightProduct,
)
from quant.calibration.moments_writer import MomentsInput, MomentSums
from quant.errors import UserError
from quant.native import array_backends

# size of the squares on a triangle's diagonal, and largest side of the rectangles below them
DIAGONAL_PART_COLUMNS, MAX_PART_COLUMNS = 256, 1024
PRODUCT_ROWS, MAX_CHUNKS_PER_PRODUCT = (
    1024,
    4,
)  # most rows and most chunks that are multiplied at a time
MAX_STORED_BYTES = 1 << 28  # most bytes of rows that are stored until they are multiplied
DEVICE_FACTOR = 8  # on a GPU the three limits above are this many times larger
MapFunction = Callable[..., Any]  # has the signature of the built-in map
WorkItem = tuple[int, Callable[[], None]]  # cost of a job, and the job
MatrixPart = tuple[slice, slice]  # rows and columns of a matrix
# most bytes of attention shares that wait to be multiplied
MAX_WAITING_BYTES = 1 << 27


def product_names(entry: MomentsInput) -> tuple[str, ...]:
    """Return the names of the products that an input is collected from, in the order in which they
    are computed.
    """
    return (*entry.names, mixing_product(entry.names[0])) if entry.mixed else entry.names


class InputSurvey:
    """The distinct `inputs` of a pass, in the order in which the graph computes them, and the bytes
    of each input's `rows`. A chunk has `tokens` tokens, and `threads` threads will multiply.
    """

    def __init__(self, tokens: int = PRODUCT_ROWS, threads: int = 1) -> None:
        self.tokens, self.threads = tokens, threads
        self.inputs: list[MomentsInput] = []
        self.rows: list[int] = []
        self._number: dict[str, int] = {}
        # bytes of attention shares that are stored for a chunk, by weight
        self._shares: dict[str, int] = {}
        self._key: tuple[int, int] | None = None

    def add(self, product: WeightProduct) -> None:
        """Add one product. If the weight was seen before, only its rows are counted."""
        number = self._number.get(product.name)
        if number is not None:
            self.rows[number] += (
                product.rows.nbytes if product.name == self.inputs[number].names[0] else 0
            )
            self._key = None
            return
        new_input = MomentsInput(
            (product.name,), product.rows.shape[-1], math.prod(product.matrices)
        )
        if (
            product.key == self._key
            and replace(new_input, names=(last := self.inputs[-1]).names) == last
        ):
            self.inputs[-1] = replace(last, names=(*last.names, product.name))
        else:
            self.inputs.append(new_input)
            self.rows.append(product.rows.nbytes)
        self._number[product.name] = len(self.inputs) - 1
        self._key = product.key

    def add_mixture(self, mixed: AttentionMixture) -> None:
        """Add one mixture. The values' input becomes a separate, mixed input, which is computed
        after all inputs so far.
        """
        name = mixed.name.replace("kqv-", "blk.") + ".attn_v.weight"
        number = self._number.get(name)
        if number is None:
            return
        if not (mixed_input := self.inputs[number]).mixed:
            rows, other_names = (
                self.rows[number],
                tuple(weight for weight in mixed_input.names if weight != name),
            )
            if other_names:
                self.inputs[number] = replace(mixed_input, names=other_names)
            else:
                del self.inputs[number], self.rows[number]
            self.inputs.append(replace(mixed_input, names=(name,), mixed=True))
            self.rows.append(rows)
            self._number = {
                weight: at
                for at, mixed_input in enumerate(self.inputs)
                for weight in mixed_input.names
            }
            self._key = None
        self.rows[self._number[name]] += mixed.shares[0].nbytes
        self._shares[name] = self._shares.get(name, 0) + select_queries(mixed.shares).nbytes

    @property
    def chunks_per_product(self) -> int:
        """Number of chunks whose rows are multiplied at a time. It does not depend on the available
        memory, so that the sums of a text have the same bytes whether they are collected in one
        pass or in several.
        """
        factor = DEVICE_FACTOR if array_backends.device() else 1
        return max(
            1,
            min(
                factor * PRODUCT_ROWS // self.tokens,
                factor * MAX_CHUNKS_PER_PRODUCT,
                factor * MAX_STORED_BYTES // max(1, sum(self.rows)),
            ),
        )

    def input_bytes(self, number: int) -> int:
        """Return the bytes of memory for an input: the sums of x x^T and of x in float64, and the
        stored rows with a joined or mixed copy.
        """
        entry, chunks = self.inputs[number], self.chunks_per_product
        return sums_bytes(entry) + self.rows[number] * (
            2 * chunks if chunks > 1 or entry.mixed else 1
        )

    def waiting_bytes(self, group: Sequence[int]) -> int:
        """Return the bytes of attention shares that a group stores before they are multiplied,
        including those of the pass that exceeds the limit.
        """
        shares = [self._shares.get(self.inputs[number].names[0], 0) for number in group]
        return min(
            self.chunks_per_product * sum(shares), MAX_WAITING_BYTES + max(shares, default=0)
        )


def sums_bytes(entry: MomentsInput) -> int:
    """Return the bytes of an input's sums."""
    return 8 * entry.matrices * (entry.columns * (entry.columns + 1) + 1)


def product_bytes(entry: MomentsInput) -> int:
    """Return the bytes of a product of an input's rows, and of the sums that it is added to."""
    return 8 * max(map(_area, _parts(0, entry.columns)))


def split_into_groups(
    survey: InputSurvey, numbers: Sequence[int], memory: int
) -> list[tuple[int, ...]]:
    """Split the input `numbers`, in order, into groups, each of which can be collected in `memory`
    bytes.

    Raises UserError if a single input needs more, because its moments cannot be split.
    """
    split: list[list[int]] = [[]]
    inputs = survey.inputs
    for number in numbers:
        if split[-1] and group_bytes(survey, [*split[-1], number]) > memory:
            split.append([])
        split[-1].append(number)
        if (need := group_bytes(survey, split[-1])) > memory:
            last_input = inputs[number]
            name, columns = last_input.names[0], f"{last_input.columns:,} columns"
            experts = f", {last_input.matrices} experts" if last_input.matrices > 1 else ""
            raise UserError(
                f"the second moments of {name} ({columns}{experts})"
                f" need {need:,} bytes of memory, {memory:,} may be used",
                hint=f"free memory, or allow more with --memory {-(-need // 10**6)}M,"
                " or leave --moments out",
            )
    return [tuple(group) for group in split if group]


def group_bytes(survey: InputSurvey, group: Sequence[int]) -> int:
    """Return the bytes of memory that collecting a group of inputs takes."""
    inputs = survey.inputs
    most = max((product_bytes(inputs[number]) for number in group), default=0)
    return sum(map(survey.input_bytes, group)) + survey.waiting_bytes(group) + survey.threads * most


class MomentsCollector:
    """The sums of a group of inputs; `numbers` are the indices of the group in `inputs`."""

    def __init__(self, inputs: Sequence[MomentsInput], numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._number = {name: number for number in numbers for name in inputs[number].names}
        self._names = {number: inputs[number].names for number in numbers}
        self._mixed = {
            mixing_product(inputs[number].names[0]): number
            for number in numbers
            if inputs[number].mixed
        }
        # one mixture for each chunk
        self._mixing = {number: [ChunkMixing()] for number in self._mixed.values()}
        self._keys: dict[int, tuple[int, int]] = {}
        self._kept = {number: _InputRows() for number in numbers}
        self.waiting_chunks = 0  # chunks that are not yet added to the sums
        self.sums = {number: _empty_sums(inputs[number]) for number in numbers}

    def add(self, product: WeightProduct) -> None:
        """Store the input rows, once for all weights that share them."""
        number = self._number.get(product.name)
        if number is None:
            return
        if product.name != self._names[number][0]:
            assert product.key == self._keys[number], (product.name, self._names[number])
            return
        self._keys[number] = product.key
        self._kept[number].add(product)

    def add_mixture(self, mixed: AttentionMixture) -> None:
        """Store the attention shares of a layer; multiply them at once if too many bytes are stored
        already.
        """
        number = self._mixed.get(mixed.name)
        if number is None:
            return
        last = self._mixing[number][-1]
        last.add(mixed.shares)
        if self._shares > MAX_WAITING_BYTES:
            last.multiply_waiting()

    @property
    def _shares(self) -> int:
        """Bytes of attention shares that are stored."""
        return sum(mixing.waiting_bytes for chunks in self._mixing.values() for mixing in chunks)

    def end_chunk(self, each: MapFunction = map) -> None:
        """End a chunk, which may have taken several passes. `each` is map or a threaded map; the
        sums are the same with either.
        """
        if self._shares > MAX_WAITING_BYTES // 2:  # leave memory for the next chunk
            _run_all(
                each,
                [mixing.multiply_waiting for chunks in self._mixing.values() for mixing in chunks],
            )
        for number, chunks in self._mixing.items():
            chunks[-1].rows = self._kept[number].turn()
            chunks.append(ChunkMixing())
        self.waiting_chunks += 1

    def flush(self, sums: ImatrixCollector, each: MapFunction = map) -> None:
        """Add all ended chunks to the moments, and the squares of their rows to `sums`."""
        squares = [
            partial(sums.add_shared, kept.product(self._names[number][0]), self._names[number])
            for number, kept in self._kept.items()
            if kept.rows.size
        ]
        _run_all(each, squares)  # raises UserError for the first weight whose input is not finite
        ended = [(number, item) for number, chunks in self._mixing.items() for item in chunks[:-1]]
        mixtures = each(
            ChunkMixing.mix_rows,
            [item for _, item in ended],
            [self._kept[number].rows[0, 0] for number, _ in ended],
        )
        mixes: dict[int, list[MixedRows]] = {}
        for (number, _), mix in zip(ended, mixtures, strict=True):
            mixes.setdefault(number, []).append(mix)
        work = [
            item
            for number, kept in self._kept.items()
            for item in kept.work(self.sums[number], mixes.get(number, []))
        ]
        work.sort(key=operator.itemgetter(0), reverse=True)
        _run_all(each, [make for _, make in work])
        for kept in self._kept.values():
            kept.clear()
        self._mixing = {number: [ChunkMixing()] for number in self._mixing}
        self.waiting_chunks = 0


class _InputRows:
    """The rows of an input, collected over several passes. The memory is reused, because fresh
    pages cost more than copying.
    """

    def __init__(self) -> None:
        self.matrices, self.experts = (1, 1), list[NDArray[np.int32]]()
        # [.., tokens, columns], or with experts [tokens, .., columns]
        self._buffer = np.empty((0, 0, 0, 0), np.float32)
        self._chunk_start = self._end = 0

    @property
    def rows(self) -> F32:
        """All rows so far."""
        rows: F32 = self._buffer[: self._end] if self.experts else self._buffer[..., : self._end, :]
        return rows

    def add(self, product: WeightProduct) -> None:
        """Append a copy of the product's rows."""
        first, rows = self._end, product.rows
        if product.experts is not None:
            self.experts.append(product.experts.copy())
        self.matrices, axis = product.matrices, 0 if self.experts else 2
        if first + rows.shape[axis] > self._buffer.shape[axis]:
            before, shape = self.rows, list(rows.shape)
            shape[axis] += first
            self._buffer = np.empty(shape, np.float32)
            if first:
                self.rows[...] = before
        self._end = first + rows.shape[axis]
        (
            self._buffer[first : self._end]
            if self.experts
            else self._buffer[..., first : self._end, :]
        )[...] = rows

    def turn(self) -> slice:
        """Return the slice of the rows that were added since the last call."""
        first, self._chunk_start = self._chunk_start, self._end
        return slice(first, self._end)

    def product(self, name: str) -> WeightProduct:
        """Return all rows as the input of one weight."""
        experts = np.concatenate(self.experts) if self.experts else None
        return WeightProduct(name, self.rows, self.matrices, experts, (0, 0))

    def clear(self) -> None:
        """Forget all rows."""
        self._chunk_start = self._end = 0
        self.experts.clear()

    def work(self, into: MomentSums, mixes: Sequence[MixedRows]) -> Iterator[WorkItem]:
        """Yield the jobs that add the rows, or their `mixes`, to the sums."""
        rows = self.rows
        if self.experts:
            experts = np.concatenate(self.experts)
            for expert in np.unique(experts):
                places = np.nonzero(experts == expert)
                yield (
                    len(places[0]) * rows.shape[2],
                    partial(_expert, into, int(expert), rows, places),
                )
            return
        inner, outer = self.matrices
        entered: dict[int, list[F32]] = {}
        for i3, i2 in np.ndindex(rows.shape[:2]):
            entered.setdefault((i3 % outer) * inner + i2 % inner, []).append(rows[i3, i2])
        for matrix, parts in entered.items():
            plain = parts[0] if len(parts) == 1 else np.concatenate(parts)
            other = np.concatenate([mix.rows for mix in mixes]) if mixes else plain
            yield plain.size, partial(_first, into, matrix, plain, mixes)
            if array_backends.device():
                yield (
                    plain.size * plain.shape[1],
                    partial(_triangle, into.second[matrix], plain, other),
                )
                continue
            for part in _parts(0, plain.shape[1]):
                yield (
                    len(plain) * _area(part),
                    partial(_product, into.second[matrix], part, plain, other),
                )


def _run_all(each: MapFunction, work: Iterable[Callable[[], None]]) -> None:
    """Run all jobs; the first exception of a job is raised here."""
    for _ in each(operator.call, work):
        pass


def _first(into: MomentSums, matrix: int, rows: F32, mixes: Sequence[MixedRows]) -> None:
    """Add the sum of the rows, or of their mixtures."""
    into.first[matrix] += (
        sum(mix.first for mix in mixes) if mixes else rows.sum(0, dtype=np.float64)
    )
    into.counts[matrix] += sum(mix.count for mix in mixes) if mixes else len(rows)


def _expert(into: MomentSums, expert: int, rows: F32, places: tuple[Any, ...]) -> None:
    """Add the rows of one expert."""
    tokens, slots = places
    routed = rows[tokens, slots % rows.shape[1]]
    into.first[expert] += routed.sum(0, dtype=np.float64)
    into.counts[expert] += len(routed)
    _triangle(into.second[expert], routed, routed)


def _parts(first: int, last: int) -> Iterator[MatrixPart]:
    """Yield the parts of the lower triangle of columns first .. last: squares on its diagonal, half
    of which is redundant, and the rectangles below them.
    """
    if last - first <= DIAGONAL_PART_COLUMNS:
        yield slice(first, last), slice(first, last)
        return
    middle = first + -(-(last - first) // (2 * DIAGONAL_PART_COLUMNS)) * DIAGONAL_PART_COLUMNS
    for row in range(middle, last, MAX_PART_COLUMNS):
        for column in range(first, middle, MAX_PART_COLUMNS):
            yield (
                slice(row, min(row + MAX_PART_COLUMNS, last)),
                slice(column, min(column + MAX_PART_COLUMNS, middle)),
            )
    yield from _parts(first, middle)
    yield from _parts(middle, last)


def _area(part: MatrixPart) -> int:
    rows, columns = part
    return int((rows.stop - rows.start) * (columns.stop - columns.start))


def _triangle(sums: F64, rows: F32, other: F32) -> None:
    """Add the lower triangle of rows^T other to the sums, part by part: on a GPU with enough
    memory, else on this thread.
    """
    done, ops = 0, array_backends.array_backend(array_backends.device())
    parts = [*_parts(0, rows.shape[1])]
    try:
        with ops.exclusive_access():
            left_rows = ops.array(rows)
            right_rows = left_rows if other is rows else ops.array(other)
            for part in parts:
                _add(
                    sums,
                    part,
                    ops.to_numpy(left_rows[:, part[0]].T @ right_rows[:, part[1]]),
                    mixed=other is not rows,
                )
                done += 1
    except array_backends.DeviceOutOfMemory:
        pass
    for part in parts[done:]:
        _product(sums, part, rows, other)


def _product(sums: F64, part: MatrixPart, rows: F32, other: F32) -> None:
    """Add one part of the lower triangle of rows^T other to the sums."""
    down, across = part
    _add(sums, part, rows[:, down].T @ other[:, across], mixed=other is not rows)


def _add(sums: F64, part: MatrixPart, products: F32, *, mixed: bool) -> None:
    """Add a product to a part of the sums."""
    down, across = part
    sums[part] += products
    if mixed and down == across:
        corner = sums[part]
        # rounding to float32 can make a square negative
        np.fill_diagonal(corner, np.maximum(corner.diagonal(), 0))


def _empty_sums(moments_input: MomentsInput) -> MomentSums:
    second: F64 = np.zeros((moments_input.matrices, moments_input.columns, moments_input.columns))
    return MomentSums(
        second,
        np.zeros((moments_input.matrices, moments_input.columns)),
        np.zeros(moments_input.matrices),
    )
