"""What a forward pass costs by its rows: T(m), measured when a model is loaded and followed while
it runs.

Multiples of four: llama.cpp multiplies quantized weights with four rows at a time, three cost as
much. The same measurement shows whether a row's logits depend on how many stand beside it.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from llmcli.runtime.binding.context import Rows
from llmcli.runtime.sampling.chain import Row

WIDTHS = (4, 8, 12, 16)  # rows of a pass with guesses
MOST = WIDTHS[-1]
SINGLES = 4  # passes of one row, at least
BUDGET = 0.25  # seconds, which small models stay within
WEIGHT = 0.1  # of a new pass in the running mean
LEARNING = 0.05  # of a new pass of several rows in what they cost beside one
# T(4) / T(1) of the slowest machine where guessing paid (notes, 6.1): to be believed until one was
# tried
HOPE = 2.7
TURN = 0.2  # at first
FOUR = 4  # rows that llama.cpp multiplies at a time; the rest of a pass goes row by row


class Passes(Protocol):
    """What is measured: a context in which nothing is held yet."""

    n_vocab: int
    n_ctx: int
    n_outputs: int

    def decode(self, rows: Rows) -> Iterable[Row]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


class Curve:
    """Seconds of a pass by its rows: `one` of a single row, times what more rows cost beside it.
    The machine's speed moves them all together, from second to second; the ratios move slowly, as
    the context grows. `turn`: what a single row costs more (a share of `one`) behind a pass of
    several: llama.cpp lays its graph out anew. `equal`: up to so many rows each had, bit for bit,
    the logits it has alone.

    At start-up another program may hold up the few passes of several rows (T(4) of 3.23 T(1) was
    seen, and nothing was guessed in that process). So a short draft is tried once although it
    looked dear, and passes that turn out cheaper are believed at once: they can be held up, not
    hurried.
    """

    def __init__(self, seconds: Mapping[int, float], equal: int = 0) -> None:
        self.one, self.equal = seconds[1], equal
        self.turn = TURN
        self.ratios = {rows: max(1.0, each / self.one) for rows, each in seconds.items()}
        self.passes: dict[int, int] = {}  # since then, by their rows

    def __call__(self, rows: int) -> float:
        return self.one * self.ratio(rows)

    def ratio(self, rows: int) -> float:
        """T(rows) / T(1), of the next multiple of four: between two known numbers of rows a
        straight line, beyond the largest the last one's slope; never less than for fewer rows.
        """
        rows = _whole(rows)
        known = self.ratios.get(rows)
        if known is not None:
            return known
        marks = sorted(self.ratios)
        low = max((mark for mark in marks if mark < rows), default=marks[0])
        high = min((mark for mark in marks if mark > rows), default=low)
        if high == low:
            low = marks[max(0, marks.index(high) - 1)]
        if high == low:
            return self.ratios[low] * rows / low
        slope = max(0.0, (self.ratios[high] - self.ratios[low]) / (high - low))
        return self.ratios[low] + slope * (rows - low)

    def hoped(self, rows: int) -> float:
        """The ratio that a guess may be made by: of few rows no more than HOPE until an answer had
        a pass of them.
        """
        ratio = self.ratio(rows)
        return ratio if rows > FOUR or FOUR in self.passes else min(ratio, HOPE)

    def saw(self, rows: int, seconds: float) -> None:
        """A pass took so long; one hiccup counts twice at most. It tells the machine's speed, and
        less of the ratio.
        """
        one = self.one
        if rows == 1:
            self.one = one + WEIGHT * (min(seconds, 2 * one) - one)
            return
        ratio = self.ratio(rows)
        off = min(seconds / (one * ratio), 2.0) - 1
        self.one = one * (1 + WEIGHT * off)
        rows = _whole(rows)
        before = self.passes.get(rows, 0)
        self.passes[rows] = before + 1
        weight = max(LEARNING, 1 / (2 + before)) if off < 0 else LEARNING
        self.ratios[rows] = now = max(1.0, ratio * (1 + weight * off))
        if off < 0 and not before and ratio > 1:  # what was measured beside it had no better luck
            cheaper = (now - 1) / (ratio - 1)
            for other in self.ratios.keys() - self.passes.keys() - {1}:
                self.ratios[other] = 1 + (self.ratios[other] - 1) * cheaper

    def turned(self, seconds: float) -> None:
        """The first pass of one row behind one of several took so long."""
        self.turn += WEIGHT * (min(max(0.0, seconds / self.one - 1), 2 * TURN) - self.turn)


def _whole(rows: int) -> int:
    """Rows that cost as much: up to the next multiple of four."""
    return rows if rows == 1 else -(-rows // FOUR) * FOUR


def measure(context: Passes, most: int = MOST) -> Curve:
    """Time passes of one row and of several over the same tokens; the context is empty before and
    after.

    A large model gets as few passes as can be: one row four times, four rows once; what was not
    measured is told from the slope. With more time each number of rows is measured, then each once
    again. The quickest pass of each counts: what else the machine does only holds them up.
    """
    tokens = np.random.default_rng(0).integers(0, context.n_vocab, most).tolist()
    _pass(context, tokens[:1], 0)  # the first one pages the weights in
    context.trim(0, 0)
    begun = time.perf_counter()
    alone, times = [], []
    for at in range(most):
        seconds, rows = _pass(context, tokens[at : at + 1], at)
        times.append(seconds)
        alone += rows
        if at + 1 >= SINGLES and time.perf_counter() - begun > BUDGET / 3:
            break
    context.trim(0, 0)
    found, equal, same = {1: min(times)}, 0, True
    for again in (False, True):
        for width in (width for width in WIDTHS if width <= most):
            late = time.perf_counter() - begun + Curve(found)(width) > BUDGET
            if late and (again or width > WIDTHS[0]):
                return Curve(found, equal)
            seconds, rows = _pass(context, tokens[:width], 0)
            context.trim(0, 0)
            found[width] = min(
                seconds, found.get(width, width * found[1])
            )  # one at a time is always possible
            if not again:
                same = same and _same(rows, alone)
                equal = width if same else equal
    return Curve(found, equal)


def _pass(context: Passes, tokens: Sequence[int], start: int) -> tuple[float, list[np.ndarray]]:
    count = len(tokens)
    begun = time.perf_counter()
    rows = list(
        context.decode(Rows(tokens, range(start, start + count), [0] * count, [True] * count))
    )
    return time.perf_counter() - begun, [row.logits.copy() for row in rows]


def _same(rows: list[np.ndarray], alone: list[np.ndarray]) -> bool:
    return all(np.array_equal(row, one) for row, one in zip(rows, alone, strict=False))
