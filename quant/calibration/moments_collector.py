"""Collection of second moments: which weights share an input, how many inputs fit into memory at a
time, and the sums.

Rows are multiplied in float32, once for each distinct input, and added in float64. Only the lower
triangle is computed, in squares along the diagonal and rectangles between them. Rows are stored
until several whole chunks have been read, because larger products are faster. While llama.cpp waits
for the callback that observes its products, rows are only copied; squares and mixtures are computed
later.

Each product runs on one thread: BLAS's own threads busy-wait like llama.cpp's and would take time
from them. If torch has a GPU, it computes the products, of more rows at a time.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.calibration.attention_moments import Mix, Mixing, counted
from quant.calibration.expected_moments import mixture
from quant.calibration.imatrix_collector import F32, F64, Mixture, Product, Sums
from quant.calibration.moments_writer import Gathered, Input
from quant.errors import Refusal
from quant.native import array_backends

# columns of a triangle's parts: of those on its diagonal, and of the others at most
SQUARE, LARGE = 256, 1024
ROWS, MOST = 1024, 4  # most rows and most chunks that are multiplied at a time
KEPT = 1 << 28  # most bytes that wait for it
ON_DEVICE = 8  # all three are so many times larger on a GPU
Each = Callable[..., Any]  # the signature of map
Work = tuple[int, Callable[[], None]]  # cost, and the job
Part = tuple[slice, slice]  # rows and columns of a matrix
# most bytes of attention shares that wait to be multiplied
WAITING = 1 << 27


def shown(one: Input) -> tuple[str, ...]:
    """Return the names of the products that an input is collected from, in the order in which they
    are computed.
    """
    return (*one.names, mixture(one.names[0])) if one.mixed else one.names


class Survey:
    """The distinct `inputs` of a pass, in the order in which the graph computes them, and the bytes
    of `rows` of each. A chunk has `tokens`; `threads` will multiply.
    """

    def __init__(self, tokens: int = ROWS, threads: int = 1) -> None:
        self.tokens, self.threads = tokens, threads
        self.inputs: list[Input] = []
        self.rows: list[int] = []
        self._number: dict[str, int] = {}
        self._shares: dict[str, int] = {}  # bytes stored for a chunk, by weight
        self._key: tuple[int, int] | None = None

    def add(self, product: Product) -> None:
        """Add one product. A weight that was seen before only adds its rows."""
        number = self._number.get(product.name)
        if number is not None:
            self.rows[number] += (
                product.rows.nbytes if product.name == self.inputs[number].names[0] else 0
            )
            self._key = None
            return
        new_input = Input((product.name,), product.rows.shape[-1], math.prod(product.matrices))
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

    def mix(self, mixed: Mixture) -> None:
        """Add one mixture. A mixed input is separate from others, and is computed after all inputs
        so far.
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
        self._shares[name] = self._shares.get(name, 0) + counted(mixed.shares).nbytes

    @property
    def together(self) -> int:
        """Chunks whose rows are multiplied at a time. It does not depend on the available memory,
        so that the sums of a text have the same bytes in any number of passes.
        """
        factor = ON_DEVICE if array_backends.device() else 1
        return max(
            1,
            min(
                factor * ROWS // self.tokens, factor * MOST, factor * KEPT // max(1, sum(self.rows))
            ),
        )

    def cost(self, number: int) -> int:
        """Return the bytes of memory for an input: sums of x x^T and of x in float64, and rows with
        a joined or mixed copy.
        """
        entry, chunks = self.inputs[number], self.together
        return held(entry) + self.rows[number] * (2 * chunks if chunks > 1 or entry.mixed else 1)

    def waiting(self, group: Sequence[int]) -> int:
        """Return the bytes of attention shares that wait to be multiplied, and of those that arrive
        when the limit is reached.
        """
        shares = [self._shares.get(self.inputs[number].names[0], 0) for number in group]
        return min(self.together * sum(shares), WAITING + max(shares, default=0))


def held(one: Input) -> int:
    """Return the bytes of an input's sums."""
    return 8 * one.matrices * (one.columns * (one.columns + 1) + 1)


def spare(one: Input) -> int:
    """Return the bytes of a product of an input, and of the sums that it is added to."""
    return 8 * max(map(_area, _parts(0, one.columns)))


def groups(survey: Survey, numbers: Sequence[int], memory: int) -> list[tuple[int, ...]]:
    """Split the input `numbers`, in order, into groups that can be collected at a time in `memory`
    bytes.

    Raises UserError if a single input needs more, because its moments cannot be split.
    """
    split: list[list[int]] = [[]]
    inputs = survey.inputs
    for number in numbers:
        if split[-1] and needs(survey, [*split[-1], number]) > memory:
            split.append([])
        split[-1].append(number)
        if (need := needs(survey, split[-1])) > memory:
            last_input = inputs[number]
            name, columns = last_input.names[0], f"{last_input.columns:,} columns"
            experts = f", {last_input.matrices} experts" if last_input.matrices > 1 else ""
            raise Refusal(
                f"the second moments of {name} ({columns}{experts})"
                f" need {need:,} bytes of memory, {memory:,} may be used",
                hint=f"free memory, or allow more with --memory {-(-need // 10**6)}M,"
                " or leave --moments out",
            )
    return [tuple(group) for group in split if group]


def needs(survey: Survey, group: Sequence[int]) -> int:
    """Return the bytes of memory that collecting a group of inputs takes."""
    inputs = survey.inputs
    most = max((spare(inputs[number]) for number in group), default=0)
    return sum(map(survey.cost, group)) + survey.waiting(group) + survey.threads * most


class Seconds:
    """The sums of a group of inputs. `numbers` are their indices in `inputs`."""

    def __init__(self, inputs: Sequence[Input], numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._number = {name: number for number in numbers for name in inputs[number].names}
        self._names = {number: inputs[number].names for number in numbers}
        self._mixed = {
            mixture(inputs[number].names[0]): number for number in numbers if inputs[number].mixed
        }
        # one mixture for each chunk
        self._mixing = {number: [Mixing()] for number in self._mixed.values()}
        self._keys: dict[int, tuple[int, int]] = {}
        self._kept = {number: _InputRows() for number in numbers}
        self.waiting = 0  # chunks that are not yet in the sums
        self.gathered = {number: _empty_sums(inputs[number]) for number in numbers}

    def add(self, product: Product) -> None:
        """Store the input rows, once for all weights that share them."""
        number = self._number.get(product.name)
        if number is None:
            return
        if product.name != self._names[number][0]:
            assert product.key == self._keys[number], (product.name, self._names[number])
            return
        self._keys[number] = product.key
        self._kept[number].add(product)

    def mix(self, mixed: Mixture) -> None:
        """Store how the values of a layer are mixed, or add it at once if too much waits
        already.
        """
        number = self._mixed.get(mixed.name)
        if number is None:
            return
        last = self._mixing[number][-1]
        last.add(mixed.shares)
        if self._shares > WAITING:
            last.settle()

    @property
    def _shares(self) -> int:
        """Bytes of attention shares that wait."""
        return sum(mixing.waiting for chunks in self._mixing.values() for mixing in chunks)

    def turn(self, each: Each = map) -> None:
        """End a chunk, which may have taken several passes. `each` is map or a threaded map; the
        sums are the same.
        """
        if self._shares > WAITING // 2:  # leave memory for the next chunk
            _run_all(each, [mixing.settle for chunks in self._mixing.values() for mixing in chunks])
        for number, chunks in self._mixing.items():
            chunks[-1].rows = self._kept[number].turn()
            chunks.append(Mixing())
        self.waiting += 1

    def flush(self, sums: Sums, each: Each = map) -> None:
        """Add all ended chunks to the moments, and their squares to `sums`."""
        squares = [
            partial(sums.share, kept.product(self._names[number][0]), self._names[number])
            for number, kept in self._kept.items()
            if kept.rows.size
        ]
        _run_all(each, squares)  # raises UserError with the first weight whose input is not finite
        ended = [(number, item) for number, chunks in self._mixing.items() for item in chunks[:-1]]
        mixtures = each(
            Mixing.made,
            [item for _, item in ended],
            [self._kept[number].rows[0, 0] for number, _ in ended],
        )
        mixes: dict[int, list[Mix]] = {}
        for (number, _), mix in zip(ended, mixtures, strict=True):
            mixes.setdefault(number, []).append(mix)
        work = [
            item
            for number, kept in self._kept.items()
            for item in kept.work(self.gathered[number], mixes.get(number, []))
        ]
        work.sort(key=operator.itemgetter(0), reverse=True)
        _run_all(each, [make for _, make in work])
        for kept in self._kept.values():
            kept.clear()
        self._mixing = {number: [Mixing()] for number in self._mixing}
        self.waiting = 0


class _InputRows:
    """The rows of an input over several passes, as if from one pass. The memory is reused, because
    fresh pages cost more than copying.
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

    def add(self, product: Product) -> None:
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
        """Return the slice of the rows since the last call."""
        first, self._chunk_start = self._chunk_start, self._end
        return slice(first, self._end)

    def product(self, name: str) -> Product:
        """Return all rows as the input of one weight."""
        experts = np.concatenate(self.experts) if self.experts else None
        return Product(name, self.rows, self.matrices, experts, (0, 0))

    def clear(self) -> None:
        """Forget all rows."""
        self._chunk_start = self._end = 0
        self.experts.clear()

    def work(self, into: Gathered, mixes: Sequence[Mix]) -> Iterator[Work]:
        """Yield the jobs that add the rows to the sums."""
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


def _run_all(each: Each, work: Iterable[Callable[[], None]]) -> None:
    """Run all jobs; re-raise the first exception."""
    for _ in each(operator.call, work):
        pass


def _first(into: Gathered, matrix: int, rows: F32, mixes: Sequence[Mix]) -> None:
    """Add the sum of the rows, or of their mixtures."""
    into.first[matrix] += (
        sum(mix.first for mix in mixes) if mixes else rows.sum(0, dtype=np.float64)
    )
    into.counts[matrix] += sum(mix.count for mix in mixes) if mixes else len(rows)


def _expert(into: Gathered, expert: int, rows: F32, places: tuple[Any, ...]) -> None:
    """Add the rows of one expert."""
    tokens, slots = places
    routed = rows[tokens, slots % rows.shape[1]]
    into.first[expert] += routed.sum(0, dtype=np.float64)
    into.counts[expert] += len(routed)
    _triangle(into.second[expert], routed, routed)


def _parts(first: int, last: int) -> Iterator[Part]:
    """Yield the parts of a triangle: squares on its diagonal, half of which is redundant, and the
    rectangles between them.
    """
    if last - first <= SQUARE:
        yield slice(first, last), slice(first, last)
        return
    middle = first + -(-(last - first) // (2 * SQUARE)) * SQUARE
    for row in range(middle, last, LARGE):
        for column in range(first, middle, LARGE):
            yield slice(row, min(row + LARGE, last)), slice(column, min(column + LARGE, middle))
    yield from _parts(first, middle)
    yield from _parts(middle, last)


def _area(part: Part) -> int:
    rows, columns = part
    return int((rows.stop - rows.start) * (columns.stop - columns.start))


def _triangle(sums: F64, rows: F32, other: F32) -> None:
    """Add the triangle of rows^T other part by part, on a GPU with enough memory, else on this
    thread.
    """
    done, ops = 0, array_backends.operations(array_backends.device())
    parts = [*_parts(0, rows.shape[1])]
    try:
        with ops.alone():
            left_rows = ops.array(rows)
            right_rows = left_rows if other is rows else ops.array(other)
            for part in parts:
                _add(
                    sums,
                    part,
                    ops.numpy(left_rows[:, part[0]].T @ right_rows[:, part[1]]),
                    mixed=other is not rows,
                )
                done += 1
    except array_backends.Full:
        pass
    for part in parts[done:]:
        _product(sums, part, rows, other)


def _product(sums: F64, part: Part, rows: F32, other: F32) -> None:
    """Add a part of the triangle of rows^T other."""
    down, across = part
    _add(sums, part, rows[:, down].T @ other[:, across], mixed=other is not rows)


def _add(sums: F64, part: Part, made: F32, *, mixed: bool) -> None:
    """Add a product to a part of the sums."""
    down, across = part
    sums[part] += made
    if mixed and down == across:
        corner = sums[part]
        # rounding to float32 can make a square negative
        np.fill_diagonal(corner, np.maximum(corner.diagonal(), 0))


def _empty_sums(one: Input) -> Gathered:
    second: F64 = np.zeros((one.matrices, one.columns, one.columns))
    return Gathered(second, np.zeros((one.matrices, one.columns)), np.zeros(one.matrices))
