"""The cost T(m) of a forward pass of m rows, measured when a model is loaded and updated while it
runs.

llama.cpp multiplies quantized weights with four rows at a time, so only multiples of four are
measured. The same measurement shows whether a row's logits depend on the number of rows.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.sampling.chain import RowLogits

PASS_ROWS = (4, 8, 12, 16)  # rows of a pass with drafts
MAX_PASS_ROWS = PASS_ROWS[-1]
MIN_SINGLE_PASSES = 4  # minimum passes of one row
MEASURE_SECONDS = 0.25  # seconds of the measurement for small models
SPEED_WEIGHT = 0.1  # of a new pass in the moving average
RATIO_WEIGHT = 0.05  # of a new pass of several rows in their cost relative to one row
# T(4) / T(1) of the slowest machine where drafting paid, assumed at most until a draft was tried
OPTIMISTIC_RATIO = 2.7
INITIAL_SWITCH_COST = 0.2  # at first
ROW_GROUP = 4  # rows that llama.cpp multiplies at a time; remaining rows are computed one by one


class MeasurableContext(Protocol):
    """The context to measure; it must be empty."""

    n_vocab: int
    n_ctx: int
    n_outputs: int

    def decode(self, rows: BatchRows) -> Iterable[RowLogits]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


class PassCost:
    """Seconds of a pass by its rows: `single_seconds` for one row, times a ratio for more.

    The machine's speed changes all of them from second to second; the ratios change slowly as the
    context grows. `switch_cost`: the extra cost of the first single row after a pass of several,
    relative to other single rows, because llama.cpp builds its graph again. `exact_rows`: rows up
    to which each had, bit for bit, the logits of a single row.

    At start-up other programs may slow down the few passes of several rows, so that drafting seems
    too expensive. A short draft is therefore tried once anyway, and passes that turn out faster are
    believed at once: they can be slowed down, but not sped up.
    """

    def __init__(self, seconds: Mapping[int, float], exact_rows: int = 0) -> None:
        self.single_seconds, self.exact_rows = seconds[1], exact_rows
        self.switch_cost = INITIAL_SWITCH_COST
        self.ratios = {rows: max(1.0, each / self.single_seconds) for rows, each in seconds.items()}
        self.n_passes: dict[int, int] = {}  # passes since the measurement, by their rows

    def __call__(self, rows: int) -> float:
        return self.single_seconds * self.ratio(rows)

    def ratio(self, rows: int) -> float:
        """Return T(rows) / T(1) of the next multiple of four, interpolated or extrapolated
        linearly; never less than for fewer rows.
        """
        rows = _whole(rows)
        measured = self.ratios.get(rows)
        if measured is not None:
            return measured
        marks = sorted(self.ratios)
        low = max((mark for mark in marks if mark < rows), default=marks[0])
        high = min((mark for mark in marks if mark > rows), default=low)
        if high == low:
            low = marks[max(0, marks.index(high) - 1)]
        if high == low:
            return self.ratios[low] * rows / low
        slope = max(0.0, (self.ratios[high] - self.ratios[low]) / (high - low))
        return self.ratios[low] + slope * (rows - low)

    def optimistic_ratio(self, rows: int) -> float:
        """Return the ratio by which drafts are chosen: for few rows at most OPTIMISTIC_RATIO until
        a pass of them was made.
        """
        ratio = self.ratio(rows)
        return (
            ratio
            if rows > ROW_GROUP or ROW_GROUP in self.n_passes
            else min(ratio, OPTIMISTIC_RATIO)
        )

    def record_pass(self, rows: int, seconds: float) -> None:
        """Record the duration of a pass in seconds; a slow outlier counts twice at most. It updates
        the machine's speed and, with less weight, the ratio.
        """
        single = self.single_seconds
        if rows == 1:
            self.single_seconds = single + SPEED_WEIGHT * (min(seconds, 2 * single) - single)
            return
        ratio = self.ratio(rows)
        deviation = min(seconds / (single * ratio), 2.0) - 1
        self.single_seconds = single * (1 + SPEED_WEIGHT * deviation)
        rows = _whole(rows)
        before = self.n_passes.get(rows, 0)
        self.n_passes[rows] = before + 1
        weight = max(RATIO_WEIGHT, 1 / (2 + before)) if deviation < 0 else RATIO_WEIGHT
        self.ratios[rows] = now = max(1.0, ratio * (1 + weight * deviation))
        # rows that were measured with it were slowed down, too
        if deviation < 0 and not before and ratio > 1:
            cheaper = (now - 1) / (ratio - 1)
            for unused in self.ratios.keys() - self.n_passes.keys() - {1}:
                self.ratios[unused] = 1 + (self.ratios[unused] - 1) * cheaper

    def record_switch(self, seconds: float) -> None:
        """Record the duration of the first pass of one row after one of several, in seconds."""
        self.switch_cost += SPEED_WEIGHT * (
            min(max(0.0, seconds / self.single_seconds - 1), 2 * INITIAL_SWITCH_COST)
            - self.switch_cost
        )


def _whole(rows: int) -> int:
    """Return the next multiple of four, which costs as much; 1 stays 1."""
    return rows if rows == 1 else -(-rows // ROW_GROUP) * ROW_GROUP


def measure_pass_cost(context: MeasurableContext, max_rows: int = MAX_PASS_ROWS) -> PassCost:
    """Time passes of one row and of several over the same tokens. The context must be empty, and is
    empty afterwards.

    A large model gets few passes: one row four times, four rows once; other sizes are extrapolated.
    With more time each number of rows is measured twice. The fastest pass counts, because other
    programs can only slow passes down.
    """
    tokens = np.random.default_rng(0).integers(0, context.n_vocab, max_rows).tolist()
    _pass(context, tokens[:1], 0)  # the first pass reads the weights from disk
    context.trim(0, 0)
    begun = time.perf_counter()
    single_rows, times = [], []
    for at in range(max_rows):
        seconds, rows = _pass(context, tokens[at : at + 1], at)
        times.append(seconds)
        single_rows += rows
        if at + 1 >= MIN_SINGLE_PASSES and time.perf_counter() - begun > MEASURE_SECONDS / 3:
            break
    context.trim(0, 0)
    times_by_rows, equal, still_equal = {1: min(times)}, 0, True
    for is_repeat in (False, True):
        for width in (width for width in PASS_ROWS if width <= max_rows):
            out_of_time = (
                time.perf_counter() - begun + PassCost(times_by_rows)(width) > MEASURE_SECONDS
            )
            if out_of_time and (is_repeat or width > PASS_ROWS[0]):
                return PassCost(times_by_rows, equal)
            seconds, rows = _pass(context, tokens[:width], 0)
            context.trim(0, 0)
            times_by_rows[width] = min(
                seconds, times_by_rows.get(width, width * times_by_rows[1])
            )  # single rows are always possible
            if not is_repeat:
                still_equal = still_equal and _same(rows, single_rows)
                equal = width if still_equal else equal
    return PassCost(times_by_rows, equal)


def _pass(
    context: MeasurableContext, tokens: Sequence[int], start: int
) -> tuple[float, list[np.ndarray]]:
    count = len(tokens)
    begun = time.perf_counter()
    rows = list(
        context.decode(BatchRows(tokens, range(start, start + count), [0] * count, [True] * count))
    )
    return time.perf_counter() - begun, [row.logits.copy() for row in rows]


def _same(rows: list[np.ndarray], alone: list[np.ndarray]) -> bool:
    return all(np.array_equal(row, single) for row, single in zip(rows, alone, strict=False))
