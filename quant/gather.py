"""Second moments as they are gathered: which weights share an input, as many inputs at a time as memory holds, and the
sums themselves.

A chunk's rows are multiplied in float32 (once for each distinct input) and added up in float64, the lower triangles
alone, in bands: 512 rows of 1,536 columns took one AVX2 thread 13 ms, numpy's own symmetric product 21 ms (2026-11).
They are kept until the chunk was read: multiplied within the pass, BLAS's threads would share the cores with those of
llama.cpp, which wait awake. It knows names and rows; what runs the model is passed in.

Attention mixes what comes out of a layer's values: for head h and query q o = W_v (sum over t of a_hqt x_t). The error
of W_v is felt behind that, so that its moments are those of the sum in brackets: X^T B X with B the sum of A^T A over
heads. 2026-11-22, SmolLM2-135M, attn_v of all layers at Q4_K_M's types and nothing else quantized, KL divergence on
three chunks of Wikipedia and three of plays, 24 chunks of calibration: ggml with its imatrix .01031 and .00842; error
feedback by the moments of x .01446 and .00901, by these .00077 and .00132; by a B for each head of keys .00078 and
.00130 (three times the disk and the work); by each token's sum of a^2 instead of B .00080 and .00150.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from quant.calibrate import F32, F64, Mixture, Product
from quant.errors import Refusal
from quant.momentfile import Gathered, Input
from quant.pending import mixture

BAND = 256  # rows of a triangle that are made at a time
# A share below this counts as none: products of two would be denormal numbers, each 100 cycles of a CPU. They were ten
# of the eleven CPU seconds that mixing took of 20 chunks of a Llama of hidden 512 and 4 layers (2026-11-22).
TINY = 1e-15
STRIP = 64  # queries whose shares are multiplied at a time: those behind the last one that they see are zeros


def shown(one: Input) -> tuple[str, ...]:
    """The names of the products that an input is gathered from, in the order in which they are computed."""
    return (*one.names, mixture(one.names[0])) if one.mixed else one.names


class Survey:
    """Looks once at what a pass shows: the distinct `inputs`, in the order in which the graph computes them, and how
    many bytes of `rows` entered each."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.rows: list[int] = []
        self._number: dict[str, int] = {}
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

    def cost(self, number: int) -> int:
        """Bytes that gathering an input holds: sums of x x^T and of x in float64, and a chunk's rows."""
        return held(self.inputs[number]) + self.rows[number]


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
    return sum(map(survey.cost, group)) + max((spare(inputs[number]) for number in group), default=0)


class Seconds:
    """The sums of a group of inputs. `numbers` are theirs among `inputs`."""

    def __init__(self, inputs: Sequence[Input], numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._number = {name: number for number in numbers for name in inputs[number].names}
        self._names = {number: inputs[number].names for number in numbers}
        self._keys: dict[int, tuple[int, int]] = {}
        self._kept: dict[int, list[Product]] = {}
        self._mixing = {mixture(inputs[number].names[0]): _Mixing() for number in numbers if inputs[number].mixed}
        self.gathered = {number: _nothing(inputs[number]) for number in numbers}

    def add(self, product: Product) -> None:
        """Keep what entered, once for all weights that share it, until `flush`."""
        number = self._number.get(product.name)
        if number is None:
            return
        if product.name != self._names[number][0]:
            assert product.key == self._keys[number], (product.name, self._names[number])
            return
        self._keys[number] = product.key
        experts = None if product.experts is None else product.experts.copy()
        self._kept.setdefault(number, []).append(replace(product, rows=product.rows.copy(), experts=experts))

    def mix(self, mixed: Mixture) -> None:
        """Count in how the values of a layer are mixed."""
        if mixed.name in self._mixing:
            self._mixing[mixed.name].add(mixed.shares)

    def flush(self) -> None:
        """Count in what was kept: a chunk may have come in several passes."""
        for number, products in self._kept.items():
            mixing = self._mixing.get(mixture(self._names[number][0]))
            for matrix, rows in _each(_joined(products)):
                _add(self.gathered[number], matrix, rows, mixing)
        self._kept.clear()
        self._mixing = {name: _Mixing() for name in self._mixing}


class _Mixing:
    """How one layer's values are mixed in a chunk: with A [queries, keys] for each head, the sums of A^T A and of A
    over heads and queries, and how many these were."""

    def __init__(self) -> None:
        self.pairs, self.plain, self.count = np.zeros((0, 0), np.float32), np.zeros(0), 0

    def add(self, shares: F32) -> None:
        """One pass; the next one's queries have more keys."""
        heads, queries, keys = shares.shape
        if (more := keys - len(self.plain)) > 0:
            self.pairs, self.plain = np.pad(self.pairs, (0, more)), np.pad(self.plain, (0, more))
        for first in range(0, queries, STRIP):
            strip = shares[:, first : first + STRIP]
            strip = np.where(strip < TINY, np.float32(0), strip)
            end = int(np.flatnonzero(strip.any((0, 1))).max(initial=-1)) + 1
            rows = strip[:, :, :end].reshape(-1, end)
            self.pairs[:end, :end] += rows.T @ rows
            self.plain[:end] += rows.sum(0)
        self.count += heads * queries


def _joined(products: Sequence[Product]) -> Product:
    """The rows of several passes as those of one."""
    first = products[0]
    if len(products) == 1:
        return first
    if first.experts is None:
        return replace(first, rows=np.concatenate([one.rows for one in products], axis=2))
    experts = np.concatenate([one.experts for one in products if one.experts is not None])
    return replace(first, rows=np.concatenate([one.rows for one in products]), experts=experts)


def _each(product: Product) -> Iterator[tuple[int, F32]]:
    """The rows [rows, columns] that enter each matrix of the weight."""
    rows = product.rows
    if product.experts is not None:
        for expert in np.unique(product.experts):
            tokens, slots = np.nonzero(product.experts == expert)
            yield int(expert), rows[tokens, slots % rows.shape[1]]
        return
    inner, outer = product.matrices
    for i3, i2 in np.ndindex(rows.shape[:2]):
        yield (i3 % outer) * inner + i2 % inner, rows[i3, i2]


def _add(into: Gathered, matrix: int, rows: F32, mixing: _Mixing | None) -> None:
    rows, sums, tokens = np.ascontiguousarray(rows), into.second[matrix], len(rows)
    other = mixing.pairs[:tokens, :tokens] @ rows if mixing else rows
    for first in range(0, len(sums), BAND):
        last = first + BAND
        sums[first:last, :last] += rows[:, first:last].T @ other[:, :last]
    if mixing:
        np.fill_diagonal(sums, np.maximum(sums.diagonal(), 0))  # float32 may end below the least square
    into.first[matrix] += mixing.plain[:tokens] @ rows if mixing else rows.sum(0, dtype=np.float64)
    into.counts[matrix] += mixing.count if mixing else tokens


def _nothing(one: Input) -> Gathered:
    second: F64 = np.zeros((one.matrices, one.columns, one.columns))
    return Gathered(second, np.zeros((one.matrices, one.columns)), np.zeros(one.matrices))
