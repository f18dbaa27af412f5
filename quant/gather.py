"""Second moments as they are gathered: which weights share an input, as many inputs at a time as memory holds, and the
sums themselves.

Rows are multiplied in float32 (once for each distinct input) and added up in float64, the lower triangles alone, in
bands: 512 rows of 1,536 columns took one AVX2 thread 13 ms, numpy's own symmetric product 21 ms (2026-11). They are
kept until whole chunks were read, as many as make ROWS: 1,536 columns took one AVX-512 thread 7.8 ms for each 256 rows
where they came 256 at a time, 6.4 for 512 and 6.0 for 1,024 (2026-11-22). Of another's 1,024 rows took 28.4 ms in bands
of 128, 29.8 in bands of 256 and 29.9 as numpy's symmetric product; twice the rows at a time made no band faster.

Each product is one thread's. BLAS's own threads wait awake for the next one, as llama.cpp's do, and on as many cores
the ones took time from the others: 20 chunks of 256 of a Llama of hidden 512 took 20, 22 and 25 CPU seconds of a loaded
machine's two cores, 29, 29 and 39 before (2026-11-22, in turns; llama-imatrix 7 to 8). It knows names and rows; what
runs the model, and what runs the products, is passed in.

Attention mixes what comes out of a layer's values: for head h and query q o = W_v (sum over t of a_hqt x_t). The error
of W_v is felt behind that, so that its moments are those of the sum in brackets: X^T B X with B the sum of A^T A over
heads. 2026-11-22, SmolLM2-135M, attn_v of all layers at Q4_K_M's types and nothing else quantized, KL divergence on
three chunks of Wikipedia and three of plays, 24 chunks of calibration: ggml with its imatrix .01031 and .00842; error
feedback by the moments of x .01446 and .00901, by these .00077 and .00132; by a B for each head of keys .00078 and
.00130 (three times the disk and the work); by each token's sum of a^2 instead of B .00080 and .00150.
Neighbouring queries look at nearly the same: with every second one alone (30 chunks of 512 of a Llama of hidden 512)
the error of attn_v's codes under the moments of all queries of 100 chunks was the same (+0.0 %), with every fourth
0.6 % larger.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.calibrate import F32, F64, Mixture, Product
from quant.errors import Refusal
from quant.momentfile import Gathered, Input
from quant.pending import mixture

BAND = 128  # rows of a triangle that are made at a time
ROWS, MOST = 1024, 4  # multiplied at a time, or the rows of so many chunks,
KEPT = 1 << 28  # where no more bytes wait for it
# A share below this counts as this: products of two would be denormal numbers, each 100 cycles of a CPU. They were ten
# of the eleven CPU seconds that mixing took of 20 chunks of a Llama of hidden 512 and 4 layers (2026-11-22).
TINY = np.float32(1e-15)
Each = Callable[..., Any]  # map's form
WAITING = 1 << 27  # bytes of attention's shares that are multiplied at the end of their chunk; others at once
EVERY = 2  # of so many queries in a row one is counted in: see above
STRIP = 64  # queries whose shares are multiplied at a time: those behind the last one that they see are zeros


def shown(one: Input) -> tuple[str, ...]:
    """The names of the products that an input is gathered from, in the order in which they are computed."""
    return (*one.names, mixture(one.names[0])) if one.mixed else one.names


class Survey:
    """Looks once at what a pass shows: the distinct `inputs`, in the order in which the graph computes them, and how
    many bytes of `rows` entered each. A chunk has `tokens`; so many `threads` will multiply."""

    def __init__(self, tokens: int = ROWS, threads: int = 1) -> None:
        self.tokens, self.threads = tokens, threads
        self.inputs: list[Input] = []
        self.rows: list[int] = []
        self._number: dict[str, int] = {}
        self._shares: dict[str, int] = {}  # bytes in a chunk, by the weight
        self._key: tuple[int, int] | None = None

    def add(self, product: Product) -> None:
        """Count one product in. A weight that was seen before brings more rows and nothing else."""
        number = self._number.get(product.name)
        if number is not None:
            self.rows[number] += product.rows.nbytes if product.name == self.inputs[number].names[0] else 0
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
        self._shares[name] = self._shares.get(name, 0) + mixed.shares.nbytes

    @property
    def together(self) -> int:
        """Chunks whose rows are multiplied at a time. It does not depend on what else memory has to hold: sums of the
        same text have the same bytes in any number of passes."""
        return max(1, min(ROWS // self.tokens, MOST, KEPT // max(1, sum(self.rows))))

    def cost(self, number: int) -> int:
        """Bytes that gathering an input holds: sums of x x^T and of x in float64, and rows, joined or mixed anew."""
        one, chunks = self.inputs[number], self.together
        return held(one) + self.rows[number] * (2 * chunks if chunks > 1 or one.mixed else 1)

    def waiting(self, group: Sequence[int]) -> int:
        """Bytes of attention's shares that wait until the chunk is over, and those that come when there is no room."""
        shares = [self._shares.get(self.inputs[number].names[0], 0) for number in group]
        return min(sum(shares), WAITING + max(shares, default=0))


def held(one: Input) -> int:
    """Bytes of an input's sums."""
    return 8 * one.matrices * (one.columns * (one.columns + 1) + 1)


def spare(one: Input) -> int:
    """Bytes that a product of it takes, and the sums that it becomes."""
    return 8 * min(BAND, one.columns) * one.columns


def groups(survey: Survey, numbers: Sequence[int], memory: int) -> list[tuple[int, ...]]:
    """Split these `numbers` of inputs, in their order, into groups that can be gathered at a time in `memory` bytes.

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
        self._mixing = {mixture(inputs[number].names[0]): _Mixing() for number in numbers if inputs[number].mixed}
        self._keys: dict[int, tuple[int, int]] = {}
        self._kept = {number: _Kept() for number in numbers}
        self._mixes: dict[int, list[_Mix]] = {}
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
        """Count in how the values of a layer are mixed."""
        if mixed.name in self._mixing:
            self._mixing[mixed.name].add(mixed.shares)
            if sum(one.waiting for one in self._mixing.values()) > WAITING:
                self._mixing[mixed.name].settle()

    def turn(self, each: Each = map) -> None:
        """A chunk is over, which may have come in several passes. `each` is map, or one that has threads: the sums are
        the same."""
        mixed = [number for number in self.numbers if mixture(self._names[number][0]) in self._mixing]
        mixings = [self._mixing[mixture(self._names[number][0])] for number in mixed]
        made = each(_Mixing.of, mixings, [self._kept[number].turn() for number in mixed])
        for number, mix in zip(mixed, made, strict=True):
            self._mixes.setdefault(number, []).append(mix)
        self._mixing = {name: _Mixing() for name in self._mixing}
        self.waiting += 1

    def flush(self, each: Each = map) -> None:
        """Count in all chunks that are over."""
        work = [
            one
            for number, kept in self._kept.items()
            for one in kept.work(self.gathered[number], self._mixes.get(number, []))
        ]
        work.sort(key=operator.itemgetter(0), reverse=True)
        for _ in each(operator.call, [make for _, make in work]):
            pass
        for kept in self._kept.values():
            kept.clear()
        self._mixes, self.waiting = {}, 0


class _Kept:
    """What entered in several passes as if in one, in memory that is taken once: fresh pages cost more than copying."""

    def __init__(self) -> None:
        self.matrices, self.experts = (1, 1), list[NDArray[np.int32]]()
        self._room = np.empty((0, 0, 0, 0), np.float32)  # [.., tokens, columns], or with experts [tokens, .., columns]
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
        (self._room[first : self._end] if self.experts else self._room[..., first : self._end, :])[...] = rows

    def turn(self) -> F32:
        """The rows [tokens, columns] since it was last asked."""
        first, self._begun = self._begun, self._end
        return self.rows[0, 0, first:]

    def clear(self) -> None:
        """Nothing entered yet."""
        self._begun = self._end = 0
        self.experts.clear()

    def work(self, into: Gathered, mixes: Sequence["_Mix"]) -> Iterator[tuple[int, Callable[[], None]]]:
        """What is to be done to count it in: how much each part takes, and the part."""
        rows = self.rows
        if self.experts:
            experts = np.concatenate(self.experts)
            for expert in np.unique(experts):
                places = np.nonzero(experts == expert)
                yield len(places[0]) * rows.shape[2], partial(_expert, into, int(expert), rows, places)
            return
        inner, outer = self.matrices
        entered: dict[int, list[F32]] = {}
        for i3, i2 in np.ndindex(rows.shape[:2]):
            entered.setdefault((i3 % outer) * inner + i2 % inner, []).append(rows[i3, i2])
        for matrix, parts in entered.items():
            plain = parts[0] if len(parts) == 1 else np.concatenate(parts)
            other = np.concatenate([mix.rows for mix in mixes]) if mixes else plain
            into.first[matrix] += sum(mix.first for mix in mixes) if mixes else plain.sum(0, dtype=np.float64)
            into.counts[matrix] += sum(mix.count for mix in mixes) if mixes else len(plain)
            for first in range(0, plain.shape[1], BAND):
                yield len(plain) * (first + BAND), partial(_band, into.second[matrix], first, plain, other)


@dataclass(frozen=True, slots=True)
class _Mix:
    """Of the rows X of a chunk: `rows` B X, `first` the sum of all mixtures, `count` how many these were."""

    rows: F32
    first: F64
    count: int


class _Mixing:
    """How one layer's values are mixed in a chunk: with A [queries, keys] for each head, the sums of A^T A and of A
    over heads and every other query, and how many these were."""

    def __init__(self) -> None:
        self.pairs, self.plain, self.count = np.zeros((0, 0), np.float32), np.zeros(0), 0
        self._strips: list[F32] = []

    @property
    def waiting(self) -> int:
        """Bytes of what is not multiplied yet."""
        return sum(rows.nbytes for rows in self._strips)

    def add(self, shares: F32) -> None:
        """One pass; the next one's queries have more keys. Copied, no more: llama.cpp waits awake meanwhile."""
        shares = shares[:, EVERY - 1 :: EVERY]
        heads, queries, keys = shares.shape
        if (more := keys - len(self.plain)) > 0:
            self.pairs, self.plain = np.pad(self.pairs, (0, more)), np.pad(self.plain, (0, more))
        for first in range(0, queries, STRIP):
            strip = shares[:, first : first + STRIP]
            end = int(np.flatnonzero(strip.max(0).max(0)).max(initial=-1)) + 1
            self._strips.append(np.maximum(strip[:, :, :end], TINY).reshape(-1, end))
        self.count += heads * queries

    def settle(self) -> None:
        """Multiply what waits, in the order in which it came."""
        for rows in self._strips:
            end = rows.shape[1]
            self.pairs[:end, :end] += rows.T @ rows
            self.plain[:end] += rows.sum(0)
        self._strips.clear()

    def of(self, rows: F32) -> _Mix:
        """What is made of the rows [tokens, columns]."""
        self.settle()
        tokens = len(rows)
        return _Mix(self.pairs[:tokens, :tokens] @ rows, self.plain[:tokens] @ rows, self.count)


def _expert(into: Gathered, expert: int, rows: F32, places: tuple[Any, ...]) -> None:
    """Count in the rows that went to one expert."""
    tokens, slots = places
    taken = rows[tokens, slots % rows.shape[1]]
    into.first[expert] += taken.sum(0, dtype=np.float64)
    into.counts[expert] += len(taken)
    for first in range(0, taken.shape[1], BAND):
        _band(into.second[expert], first, taken, taken)


def _band(sums: F64, first: int, rows: F32, other: F32) -> None:
    """Add some rows of the triangle of rows^T other."""
    last = first + BAND
    sums[first:last, :last] += rows[:, first:last].T @ other[:, :last]
    if other is not rows:
        corner = sums[first:last, first:last]
        np.fill_diagonal(corner, np.maximum(corner.diagonal(), 0))  # float32 may end below the least square


def _nothing(one: Input) -> Gathered:
    second: F64 = np.zeros((one.matrices, one.columns, one.columns))
    return Gathered(second, np.zeros((one.matrices, one.columns)), np.zeros(one.matrices))
