"""Collects second moments: finds out which weights share an input and how many inputs fit into
memory at a time, and computes their sums.

Rows are multiplied in float32, once for each distinct input, and the products are added in float64.
Only the lower triangle is computed, as squares along the diagonal and rectangles below them. Rows
are stored until several whole chunks have been read, because larger products are faster. The
callback that observes llama.cpp's products only copies rows, because llama.cpp waits for it.
Squares and mixtures are computed later.

Each product runs on one thread, because BLAS's own threads busy-wait like llama.cpp's and would
take time from them. If torch has a GPU, the GPU computes the products, of more rows at a time.
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
    AttentionMixture,
    ImatrixCollector,
    WeightProduct,
)
from quant.calibration.moments_writer import MomentsInput, MomentSums
from quant.calibration.triangle import STRIPE_ROWS, Triangle, triangle_size
from quant.errors import UserError
from quant.native import array_backends

# side of the squares on a triangle's diagonal, and maximum side of the rectangles below them
DIAGONAL_PART_COLUMNS, MAX_PART_COLUMNS = STRIPE_ROWS, 1024
# maximum numbers of rows and of chunks that are multiplied at a time
PRODUCT_ROWS, MAX_CHUNKS_PER_PRODUCT = 1024, 4
MAX_STORED_BYTES = 1 << 28  # maximum bytes of rows that are stored until they are multiplied
DEVICE_FACTOR = 8  # on a GPU the three limits above are this many times larger
MapFunction = Callable[..., Any]  # has the signature of the built-in map
WorkItem = tuple[int, Callable[[], None]]  # cost of a job in multiplications, and the job
MatrixPart = tuple[slice, slice]  # rows and columns of a matrix
# maximum bytes of attention shares that are stored until they are multiplied
MAX_WAITING_BYTES = 1 << 27


def product_names(entry: MomentsInput) -> tuple[str, ...]:
    """Return llama.cpp's names of the products from which an input is collected, in the order in
    which they are computed. They are the weights of the input, and for a mixed input also the
    product in which attention mixes the values.
    """
    return (*entry.names, mixing_product(entry.names[0])) if entry.mixed else entry.names


class InputSurvey:
    """Observes the products of one chunk to find the distinct `inputs`, in the order in which the
    graph computes them. `rows` are the bytes of each input's rows.

    A chunk has `tokens` tokens. `threads` is the number of threads that will multiply at the same
    time.
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
        """Record one product. A weight that was seen in an earlier forward pass only adds to the
        bytes of its input.
        """
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
        """Record the attention weights of one layer. The layer's value weight is moved to a
        separate, mixed input, because its moments are taken over the mixtures. The new input comes
        last, because attention runs after all products so far.
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
        """The number of chunks whose rows are multiplied at a time. It does not depend on the
        available memory, so that the sums of a text are the same bytes whether they are collected
        in one pass over the text or in several.
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
        """Return the bytes of memory that collecting input `number` takes: the sums of x x^T and of
        x in float64, the stored rows, and a joined or mixed copy of the rows.
        """
        entry, chunks = self.inputs[number], self.chunks_per_product
        return sums_bytes(entry) + self.rows[number] * (
            2 * chunks if chunks > 1 or entry.mixed else 1
        )

    def waiting_bytes(self, group: Sequence[int]) -> int:
        """Return the maximum bytes of attention shares that are stored while the inputs of `group`
        are collected. The shares of the forward pass that exceeds MAX_WAITING_BYTES are included.
        """
        shares = [self._shares.get(self.inputs[number].names[0], 0) for number in group]
        return min(
            self.chunks_per_product * sum(shares), MAX_WAITING_BYTES + max(shares, default=0)
        )


def sums_bytes(entry: MomentsInput) -> int:
    """Return the bytes of the sums of one input (MomentSums)."""
    return 8 * entry.matrices * (triangle_size(entry.columns) + entry.columns + 1)


def product_bytes(entry: MomentsInput) -> int:
    """Return the bytes of memory that one thread needs to compute the largest part of an input's
    second moments.
    """
    return 8 * max(map(_area, _parts(0, entry.columns)))


def split_into_groups(
    survey: InputSurvey, numbers: Sequence[int], memory: int
) -> list[tuple[int, ...]]:
    """Split the input `numbers`, in order, into groups whose moments can be collected within
    `memory` bytes.

    Raises UserError if a single input needs more memory, because the moments of one input cannot be
    split.
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
    """Return the bytes of memory that collecting the inputs of `group` takes."""
    inputs = survey.inputs
    largest_product = max((product_bytes(inputs[number]) for number in group), default=0)
    return (
        sum(map(survey.input_bytes, group))
        + survey.waiting_bytes(group)
        + survey.threads * largest_product
    )


class MomentsCollector:
    """Collects the sums of one group of inputs during a pass over the text. `numbers` are the
    indices of these inputs in `inputs`, and `sums` are the sums so far, by index.
    """

    def __init__(self, inputs: Sequence[MomentsInput], numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._number = {name: number for number in numbers for name in inputs[number].names}
        self._names = {number: inputs[number].names for number in numbers}
        self._mixed = {
            mixing_product(inputs[number].names[0]): number
            for number in numbers
            if inputs[number].mixed
        }
        # one ChunkMixing for each chunk; the last one belongs to the chunk in progress
        self._mixing = {number: [ChunkMixing()] for number in self._mixed.values()}
        self._keys: dict[int, tuple[int, int]] = {}
        self._rows = {number: _InputRows() for number in numbers}
        self.waiting_chunks = 0  # chunks that are not yet added to the sums
        self.sums = {
            number: MomentSums.zeros(inputs[number].matrices, inputs[number].columns)
            for number in numbers
        }

    def add(self, product: WeightProduct) -> None:
        """Store the input rows of a matrix product. Weights that multiply the same input, such as
        attn_q, attn_k and attn_v, share its rows, so only the product of the first of them is
        stored. Products whose input this collector does not measure are ignored.
        """
        number = self._number.get(product.name)
        if number is None:
            return
        if product.name != self._names[number][0]:
            assert product.key == self._keys[number], (product.name, self._names[number])
            return
        self._keys[number] = product.key
        self._rows[number].add(product)

    def add_mixture(self, mixed: AttentionMixture) -> None:
        """Store the attention shares of one layer, if its value weight belongs to the group. If too
        many bytes are stored in all, multiply the shares of this layer at once.
        """
        number = self._mixed.get(mixed.name)
        if number is None:
            return
        last = self._mixing[number][-1]
        last.add(mixed.shares)
        if self._share_bytes > MAX_WAITING_BYTES:
            last.multiply_waiting()

    @property
    def _share_bytes(self) -> int:
        """Bytes of the attention shares that are stored and not yet multiplied."""
        return sum(mixing.waiting_bytes for chunks in self._mixing.values() for mixing in chunks)

    def end_chunk(self, each: MapFunction = map) -> None:
        """Finish the rows of one chunk, which may have taken several forward passes. `each` is the
        built-in map or a thread pool's map; the sums are the same with either.
        """
        if self._share_bytes > MAX_WAITING_BYTES // 2:  # leave memory for the next chunk
            _run_all(
                each,
                [mixing.multiply_waiting for chunks in self._mixing.values() for mixing in chunks],
            )
        for number, chunks in self._mixing.items():
            chunks[-1].rows = self._rows[number].end_chunk()
            chunks.append(ChunkMixing())
        self.waiting_chunks += 1

    def flush(self, sums: ImatrixCollector, each: MapFunction = map) -> None:
        """Add the rows of all ended chunks to the moments, and the squares of these rows to `sums`.
        Then drop the rows. `each` is as in end_chunk().
        """
        squares = [
            partial(sums.add_shared, stored.product(self._names[number][0]), self._names[number])
            for number, stored in self._rows.items()
            if stored.rows.size
        ]
        _run_all(each, squares)  # raises UserError for the first weight whose input is not finite
        ended = [
            (number, mixing) for number, chunks in self._mixing.items() for mixing in chunks[:-1]
        ]
        mixtures = each(
            ChunkMixing.mix_rows,
            [mixing for _, mixing in ended],
            [self._rows[number].rows[0, 0] for number, _ in ended],
        )
        mixes: dict[int, list[MixedRows]] = {}
        for (number, _), mix in zip(ended, mixtures, strict=True):
            mixes.setdefault(number, []).append(mix)
        work = [
            job
            for number, stored in self._rows.items()
            for job in stored.work(self.sums[number], mixes.get(number, []))
        ]
        work.sort(key=operator.itemgetter(0), reverse=True)
        _run_all(each, [make for _, make in work])
        for stored in self._rows.values():
            stored.clear()
        self._mixing = {number: [ChunkMixing()] for number in self._mixing}
        self.waiting_chunks = 0


class _InputRows:
    """The stored rows of one input, from several forward passes. Their memory is used again after
    clear(), because the first access to newly allocated memory costs more than copying.
    """

    def __init__(self) -> None:
        self.matrices, self.experts = (1, 1), list[NDArray[np.int32]]()
        # [.., tokens, columns], or with experts [tokens, .., columns]
        self._buffer = np.empty((0, 0, 0, 0), np.float32)
        self._chunk_start = self._end = 0

    @property
    def rows(self) -> F32:
        """All rows stored since the last clear()."""
        rows: F32 = self._buffer[: self._end] if self.experts else self._buffer[..., : self._end, :]
        return rows

    def add(self, product: WeightProduct) -> None:
        """Append a copy of the rows of a product."""
        first, rows = self._end, product.rows
        if product.experts is not None:
            self.experts.append(product.experts.copy())
        self.matrices, axis = product.matrices, 0 if self.experts else 2
        if first + rows.shape[axis] > self._buffer.shape[axis]:
            old_rows, shape = self.rows, list(rows.shape)
            shape[axis] += first
            self._buffer = np.empty(shape, np.float32)
            if first:
                self.rows[...] = old_rows
        self._end = first + rows.shape[axis]
        (
            self._buffer[first : self._end]
            if self.experts
            else self._buffer[..., first : self._end, :]
        )[...] = rows

    def end_chunk(self) -> slice:
        """Return the slice of the rows that belong to the chunk that ends here."""
        first, self._chunk_start = self._chunk_start, self._end
        return slice(first, self._end)

    def product(self, name: str) -> WeightProduct:
        """Return all rows as if they were the input of one product with the weight `name`."""
        experts = np.concatenate(self.experts) if self.experts else None
        return WeightProduct(name, self.rows, self.matrices, experts, (0, 0))

    def clear(self) -> None:
        """Drop all rows."""
        self._chunk_start = self._end = 0
        self.experts.clear()

    def work(self, into: MomentSums, mixes: Sequence[MixedRows]) -> Iterator[WorkItem]:
        """Yield the jobs that add the rows to the sums `into`. For a mixed input, `mixes` has the
        mixtures of each chunk, which are added instead. Jobs may run in parallel, because no two
        write to the same sums.
        """
        rows = self.rows
        if self.experts:
            experts = np.concatenate(self.experts)
            for expert in np.unique(experts):
                token_slots = np.nonzero(experts == expert)
                yield (
                    len(token_slots[0]) * rows.shape[2],
                    partial(_add_expert, into, int(expert), rows, token_slots),
                )
            return
        inner, outer = self.matrices
        rows_by_matrix: dict[int, list[F32]] = {}
        for i3, i2 in np.ndindex(rows.shape[:2]):
            rows_by_matrix.setdefault((i3 % outer) * inner + i2 % inner, []).append(rows[i3, i2])
        for matrix, parts in rows_by_matrix.items():
            left_rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
            right_rows = np.concatenate([mix.rows for mix in mixes]) if mixes else left_rows
            yield left_rows.size, partial(_add_first, into, matrix, left_rows, mixes)
            if array_backends.device():
                yield (
                    left_rows.size * left_rows.shape[1],
                    partial(_add_triangle, into.triangle(matrix), left_rows, right_rows),
                )
                continue
            for part in _parts(0, left_rows.shape[1]):
                yield (
                    len(left_rows) * _area(part),
                    partial(_add_product, into.triangle(matrix), part, left_rows, right_rows),
                )


def _run_all(each: MapFunction, work: Iterable[Callable[[], None]]) -> None:
    """Run all jobs. If a job raises an exception, the first one is raised here."""
    for _ in each(operator.call, work):
        pass


def _add_first(into: MomentSums, matrix: int, rows: F32, mixes: Sequence[MixedRows]) -> None:
    """Add the sum and the number of the rows, or of their mixtures, to the sums of a matrix."""
    into.first[matrix] += (
        sum(mix.first for mix in mixes) if mixes else rows.sum(0, dtype=np.float64)
    )
    into.counts[matrix] += sum(mix.count for mix in mixes) if mixes else len(rows)


def _add_expert(into: MomentSums, expert: int, rows: F32, token_slots: tuple[Any, ...]) -> None:
    """Add the inputs of the tokens that are routed to `expert` to the expert's sums.

    `rows` [tokens, 1 or slots, columns] are the inputs of all tokens; with one row a token, all its
    experts read the same input. `token_slots` are two index arrays: the tokens that are routed to
    the expert, and for each of them the slot of the expert among the token's experts.
    """
    tokens, slots = token_slots
    routed = rows[tokens, slots % rows.shape[1]]
    into.first[expert] += routed.sum(0, dtype=np.float64)
    into.counts[expert] += len(routed)
    _add_triangle(into.triangle(expert), routed, routed)


def _parts(first: int, last: int) -> Iterator[MatrixPart]:
    """Yield the parts into which the lower triangle of columns first .. last is divided: squares on
    the diagonal, half of which is redundant, and the rectangles below them.
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


def _add_triangle(sums: Triangle, left: F32, right: F32) -> None:
    """Add the lower triangle of left^T right to the sums, one part after another. A GPU, if there
    is one, computes the parts until its memory is exhausted. This thread computes all others.
    """
    done, ops = 0, array_backends.array_backend(array_backends.device())
    parts = [*_parts(0, left.shape[1])]
    try:
        with ops.exclusive_access():
            device_left = ops.array(left)
            device_right = device_left if right is left else ops.array(right)
            for part in parts:
                _add(
                    sums,
                    part,
                    ops.to_numpy(device_left[:, part[0]].T @ device_right[:, part[1]]),
                    mixed=right is not left,
                )
                done += 1
    except array_backends.DeviceOutOfMemory:
        pass
    for part in parts[done:]:
        _add_product(sums, part, left, right)


def _add_product(sums: Triangle, part: MatrixPart, left: F32, right: F32) -> None:
    """Add one part of the lower triangle of left^T right to the sums."""
    down, across = part
    _add(sums, part, left[:, down].T @ right[:, across], mixed=right is not left)


def _add(sums: Triangle, part: MatrixPart, products: F32, *, mixed: bool) -> None:
    """Add `products` to one part of the sums. With `mixed`, the two factors of the product were
    different, so that rounding to float32 can make a square on the diagonal negative. It is then
    set to 0.
    """
    down, across = part
    sums.add(down, across, products)
    if mixed and down == across:
        sums.clip_diagonal(down)
