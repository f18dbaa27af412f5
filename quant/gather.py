"""Second moments as they are gathered: which weights share an input, as many inputs at a time as
memory holds, and the sums themselves.

Rows are multiplied in float32 (once for each distinct input) and added up in float64, the lower
triangles alone, in parts: 1,024 rows of 1,536 columns took two AVX-512 threads 16.4 ms in bands of
128 rows of the triangle, 15.2 in bands of 256, 14.4 in squares of 256 along the diagonal and whole
rectangles between them (2026-11-23); numpy's own symmetric product takes as long as bands. They are
kept until whole chunks were read, as many as make ROWS: 1,536 columns took one thread 7.8 ms for
each 256 rows where they came 256 at a time, 6.4 for 512 and 6.0 for 1,024 (2026-11-22). While
llama.cpp waits for what looks at its products, with all of its threads awake and idle, they are
copied and nothing else: squares and mixtures, too, are made later.

Each product is one thread's. BLAS's own threads wait awake for the next one, as llama.cpp's do, and
on as many cores the ones took time from the others: 20 chunks of 256 of a Llama of hidden 512 took
20, 22 and 25 CPU seconds of a loaded machine's two cores, 29, 29 and 39 before (2026-11-22, in
turns; llama-imatrix 7 to 8). A GPU that torch knows makes the products instead, of more rows at a
time: what costs there is to bring them back and to add them up. It knows names and rows; what runs
the model, and what runs the products, is passed in.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant import accelerate
from quant.calibrate import F32, F64, Mixture, Product, Sums
from quant.errors import Refusal
from quant.mixing import Mix, Mixing, counted
from quant.momentfile import Gathered, Input
from quant.pending import mixture

SQUARE, LARGE = (
    256,
    1024,
)  # sides of a triangle's parts: of those on its diagonal, and of others at most
ROWS, MOST = 1024, 4  # multiplied at a time, or the rows of so many chunks,
KEPT = 1 << 28  # where no more bytes wait for it;
ON_DEVICE = 8  # times as much by a GPU
Each = Callable[..., Any]  # map's form
Work = tuple[int, Callable[[], None]]  # how much it takes, and what is to be done
Part = tuple[slice, slice]  # rows and columns of a matrix
WAITING = (
    1 << 27
)  # bytes of attention's shares that wait to be multiplied; beyond it they are at once


def shown(one: Input) -> tuple[str, ...]:
    """The names of the products that an input is gathered from, in the order in which they are
    computed.
    """
    return (*one.names, mixture(one.names[0])) if one.mixed else one.names


class Survey:
    """Looks once at what a pass shows: the distinct `inputs`, in the order in which the graph
    computes them, and how many bytes of `rows` entered each. A chunk has `tokens`; so many
    `threads` will multiply.
    """

    def __init__(self, tokens: int = ROWS, threads: int = 1) -> None:
        self.tokens, self.threads = tokens, threads
        self.inputs: list[Input] = []
        self.rows: list[int] = []
        self._number: dict[str, int] = {}
        self._shares: dict[str, int] = {}  # bytes that are kept of a chunk, by the weight
        self._key: tuple[int, int] | None = None

    def add(self, product: Product) -> None:
        """Count one product in. A weight that was seen before brings more rows and nothing else."""
        number = self._number.get(product.name)
        if number is not None:
            self.rows[number] += (
                product.rows.nbytes if product.name == self.inputs[number].names[0] else 0
            )
            self._key = None
            return
        one = Input((product.name,), product.rows.shape[-1], math.prod(product.matrices))
        if product.key == self._key and replace(one, names=(last := self.inputs[-1]).names) == last:
            self.inputs[-1] = replace(last, names=(*last.names, product.name))
        else:
            self.inputs.append(one)
            self.rows.append(product.rows.nbytes)
        self._number[product.name] = len(self.inputs) - 1
        self._key = product.key

    def mix(self, mixed: Mixture) -> None:
        """Count one mixture in: what is mixed is an input of its own, computed behind all so far."""
        name = mixed.name.replace("kqv-", "blk.") + ".attn_v.weight"
        number = self._number.get(name)
        if number is None:
            return
        if not (one := self.inputs[number]).mixed:
            rows, others = self.rows[number], tuple(other for other in one.names if other != name)
            if others:
                self.inputs[number] = replace(one, names=others)
            else:
                del self.inputs[number], self.rows[number]
            self.inputs.append(replace(one, names=(name,), mixed=True))
            self.rows.append(rows)
            self._number = {each: at for at, one in enumerate(self.inputs) for each in one.names}
            self._key = None
        self.rows[self._number[name]] += mixed.shares[0].nbytes
        self._shares[name] = self._shares.get(name, 0) + counted(mixed.shares).nbytes

    @property
    def together(self) -> int:
        """Chunks whose rows are multiplied at a time. It does not depend on what else memory has to
        hold: sums of the same text have the same bytes in any number of passes.
        """
        more = ON_DEVICE if accelerate.device() else 1
        return max(
            1, min(more * ROWS // self.tokens, more * MOST, more * KEPT // max(1, sum(self.rows)))
        )

    def cost(self, number: int) -> int:
        """Bytes that gathering an input holds: sums of x x^T and of x in float64, and rows, joined
        or mixed anew.
        """
        one, chunks = self.inputs[number], self.together
        return held(one) + self.rows[number] * (2 * chunks if chunks > 1 or one.mixed else 1)

    def waiting(self, group: Sequence[int]) -> int:
        """Bytes of attention's shares that wait to be multiplied, and those that come when there is
        no room.
        """
        shares = [self._shares.get(self.inputs[number].names[0], 0) for number in group]
        return min(self.together * sum(shares), WAITING + max(shares, default=0))


def held(one: Input) -> int:
    """Bytes of an input's sums."""
    return 8 * one.matrices * (one.columns * (one.columns + 1) + 1)


def spare(one: Input) -> int:
    """Bytes that a product of it takes, and the sums that it becomes."""
    return 8 * max(map(_area, _parts(0, one.columns)))


def groups(survey: Survey, numbers: Sequence[int], memory: int) -> list[tuple[int, ...]]:
    """Split these `numbers` of inputs, in their order, into groups that can be gathered at a time
    in `memory` bytes.

    Raises Refusal where one alone cannot: its moments are whole or they are not there.
    """
    made: list[list[int]] = [[]]
    inputs = survey.inputs
    for number in numbers:
        if made[-1] and needs(survey, [*made[-1], number]) > memory:
            made.append([])
        made[-1].append(number)
        if (need := needs(survey, made[-1])) > memory:
            one = inputs[number]
            experts = f", {one.matrices} experts" if one.matrices > 1 else ""
            raise Refusal(
                f"the second moments of {one.names[0]} ({one.columns:,} columns{experts}) need {need:,} bytes of "
                f"memory, {memory:,} may be used",
                hint=f"free memory, or allow more: --memory {-(-need // 10**6)}M; without --moments there is no need",
            )
    return [tuple(group) for group in made if group]


def needs(survey: Survey, group: Sequence[int]) -> int:
    """Bytes of memory that gathering these inputs takes."""
    inputs = survey.inputs
    most = max((spare(inputs[number]) for number in group), default=0)
    return sum(map(survey.cost, group)) + survey.waiting(group) + survey.threads * most


class Seconds:
    """The sums of a group of inputs. `numbers` are theirs among `inputs`."""

    def __init__(self, inputs: Sequence[Input], numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._number = {name: number for number in numbers for name in inputs[number].names}
        self._names = {number: inputs[number].names for number in numbers}
        self._mixed = {
            mixture(inputs[number].names[0]): number for number in numbers if inputs[number].mixed
        }
        self._mixing = {number: [Mixing()] for number in self._mixed.values()}  # a chunk's each
        self._keys: dict[int, tuple[int, int]] = {}
        self._kept = {number: _Kept() for number in numbers}
        self.waiting = 0  # chunks that are not in the sums yet
        self.gathered = {number: _nothing(inputs[number]) for number in numbers}

    def add(self, product: Product) -> None:
        """Keep what entered, once for all weights that share it."""
        number = self._number.get(product.name)
        if number is None:
            return
        if product.name != self._names[number][0]:
            assert product.key == self._keys[number], (product.name, self._names[number])
            return
        self._keys[number] = product.key
        self._kept[number].add(product)

    def mix(self, mixed: Mixture) -> None:
        """Keep how the values of a layer are mixed, or count it in where too much waits already."""
        number = self._mixed.get(mixed.name)
        if number is None:
            return
        last = self._mixing[number][-1]
        last.add(mixed.shares)
        if self._shares > WAITING:
            last.settle()

    @property
    def _shares(self) -> int:
        """Bytes of them that wait."""
        return sum(one.waiting for chunks in self._mixing.values() for one in chunks)

    def turn(self, each: Each = map) -> None:
        """A chunk is over, which may have come in several passes. `each` is map, or one that has
        threads: the sums are the same.
        """
        if self._shares > WAITING // 2:  # room for what comes with the next chunk
            _all(each, [one.settle for chunks in self._mixing.values() for one in chunks])
        for number, chunks in self._mixing.items():
            chunks[-1].rows = self._kept[number].turn()
            chunks.append(Mixing())
        self.waiting += 1

    def flush(self, sums: Sums, each: Each = map) -> None:
        """Count in all chunks that are over, and their squares into `sums`."""
        squares = [
            partial(sums.share, kept.product(self._names[number][0]), self._names[number])
            for number, kept in self._kept.items()
            if kept.rows.size
        ]
        _all(each, squares)  # what is not finite is told here, by the first weight that it enters
        order = [(number, one) for number, chunks in self._mixing.items() for one in chunks[:-1]]
        made = each(
            Mixing.made,
            [one for _, one in order],
            [self._kept[number].rows[0, 0] for number, _ in order],
        )
        mixes: dict[int, list[Mix]] = {}
        for (number, _), mix in zip(order, made, strict=True):
            mixes.setdefault(number, []).append(mix)
        work = [
            one
            for number, kept in self._kept.items()
            for one in kept.work(self.gathered[number], mixes.get(number, []))
        ]
        work.sort(key=operator.itemgetter(0), reverse=True)
        _all(each, [make for _, make in work])
        for kept in self._kept.values():
            kept.clear()
        self._mixing = {number: [Mixing()] for number in self._mixing}
        self.waiting = 0


class _Kept:
    """What entered in several passes as if in one, in memory that is taken once: fresh pages cost
    more than copying.
    """

    def __init__(self) -> None:
        self.matrices, self.experts = (1, 1), list[NDArray[np.int32]]()
        self._room = np.empty(
            (0, 0, 0, 0), np.float32
        )  # [.., tokens, columns], or with experts [tokens, .., columns]
        self._begun = self._end = 0

    @property
    def rows(self) -> F32:
        """All rows."""
        found: F32 = self._room[: self._end] if self.experts else self._room[..., : self._end, :]
        return found

    def add(self, product: Product) -> None:
        """Copy it behind what is there."""
        first, rows = self._end, product.rows
        if product.experts is not None:
            self.experts.append(product.experts.copy())
        self.matrices, axis = product.matrices, 0 if self.experts else 2
        if first + rows.shape[axis] > self._room.shape[axis]:
            before, shape = self.rows, list(rows.shape)
            shape[axis] += first
            self._room = np.empty(shape, np.float32)
            if first:
                self.rows[...] = before
        self._end = first + rows.shape[axis]
        (self._room[first : self._end] if self.experts else self._room[..., first : self._end, :])[
            ...
        ] = rows

    def turn(self) -> slice:
        """Where the rows stand that came since it was last asked."""
        first, self._begun = self._begun, self._end
        return slice(first, self._end)

    def product(self, name: str) -> Product:
        """All as what entered one weight at once."""
        experts = np.concatenate(self.experts) if self.experts else None
        return Product(name, self.rows, self.matrices, experts, (0, 0))

    def clear(self) -> None:
        """Nothing entered yet."""
        self._begun = self._end = 0
        self.experts.clear()

    def work(self, into: Gathered, mixes: Sequence[Mix]) -> Iterator[Work]:
        """What is to be done to count it in."""
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
            if accelerate.device():
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


def _all(each: Each, work: Iterable[Callable[[], None]]) -> None:
    """Do it; what one raises is raised, the first of them where several do."""
    for _ in each(operator.call, work):
        pass


def _first(into: Gathered, matrix: int, rows: F32, mixes: Sequence[Mix]) -> None:
    """Count in the sum of the rows, or of what was mixed of them."""
    into.first[matrix] += (
        sum(mix.first for mix in mixes) if mixes else rows.sum(0, dtype=np.float64)
    )
    into.counts[matrix] += sum(mix.count for mix in mixes) if mixes else len(rows)


def _expert(into: Gathered, expert: int, rows: F32, places: tuple[Any, ...]) -> None:
    """Count in the rows that went to one expert."""
    tokens, slots = places
    taken = rows[tokens, slots % rows.shape[1]]
    into.first[expert] += taken.sum(0, dtype=np.float64)
    into.counts[expert] += len(taken)
    _triangle(into.second[expert], taken, taken)


def _parts(first: int, last: int) -> Iterator[Part]:
    """What a triangle is made of: squares on its diagonal, half of them for nothing, and what lies
    between.
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
    """Add the triangle of rows^T other, part by part: by a GPU that has room for it, else by this
    thread.
    """
    done, ops = 0, accelerate.operations(accelerate.device())
    parts = [*_parts(0, rows.shape[1])]
    try:
        with ops.alone():
            left = ops.array(rows)
            right = left if other is rows else ops.array(other)
            for part in parts:
                _add(
                    sums,
                    part,
                    ops.numpy(left[:, part[0]].T @ right[:, part[1]]),
                    mixed=other is not rows,
                )
                done += 1
    except accelerate.Full:
        pass
    for part in parts[done:]:
        _product(sums, part, rows, other)


def _product(sums: F64, part: Part, rows: F32, other: F32) -> None:
    """Add a part of the triangle of rows^T other."""
    down, across = part
    _add(sums, part, rows[:, down].T @ other[:, across], mixed=other is not rows)


def _add(sums: F64, part: Part, made: F32, *, mixed: bool) -> None:
    """Add what was multiplied."""
    down, across = part
    sums[part] += made
    if mixed and down == across:
        corner = sums[part]
        np.fill_diagonal(
            corner, np.maximum(corner.diagonal(), 0)
        )  # float32 may end below the least square


def _nothing(one: Input) -> Gathered:
    second: F64 = np.zeros((one.matrices, one.columns, one.columns))
    return Gathered(second, np.zeros((one.matrices, one.columns)), np.zeros(one.matrices))
