"""The cost T(m) of a forward pass of m rows, measured when a model is loaded and updated while it
runs.

llama.cpp multiplies quantized weights with four rows at a time, so only one row and multiples of
four are measured. The same measurement shows whether a row's logits depend on the number of rows.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.sampling.chain import RowLogits

PASS_ROWS = (4, 8, 12, 16)  # numbers of rows of a pass with drafts
MAX_PASS_ROWS = PASS_ROWS[-1]
MIN_SINGLE_PASSES = 4  # minimum number of passes of one row in the measurement
MEASURE_SECONDS = 0.25  # maximum seconds of the measurement, if the model is small enough
SPEED_WEIGHT = 0.1  # weight of a new pass in the moving average of the speed
# weight of a new pass of several rows in the moving average of its ratio to one row
RATIO_WEIGHT = 0.05
# T(4) / T(1) of the slowest machine on which drafting paid. Until a draft was tried, the ratio is
# assumed to be no larger.
OPTIMISTIC_RATIO = 2.7
INITIAL_SWITCH_COST = 0.2  # in passes of one row
ROW_GROUP = 4  # rows that llama.cpp multiplies at a time; remaining rows are computed one by one


class MeasurableContext(Protocol):
    """A context whose passes are measured. It must be empty."""

    n_vocab: int
    n_ctx: int
    n_outputs: int

    def decode(self, rows: BatchRows) -> Iterable[RowLogits]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


class PassCost:
    """The seconds of a pass, by its number of rows: `single_seconds` for one row, and that times a
    ratio for several.

    The speed of the machine changes all times from second to second; the ratios change slowly as
    the context grows. `switch_cost`: the extra cost of the first pass of one row after a pass of
    several, as a fraction of a pass of one row. It arises because llama.cpp builds its graph again.
    `exact_rows`: up to this many rows in a pass, each row had, bit for bit, the logits of a single
    row.

    While the model is loaded, other programs may slow down the few measured passes of several rows,
    so that drafting seems too expensive. For this reason a short draft is tried once anyway, and a
    pass that is faster than expected gets a larger weight than a slower one: other programs can
    slow a pass down but not speed it up.
    """

    def __init__(self, seconds: Mapping[int, float], exact_rows: int = 0) -> None:
        self.single_seconds, self.exact_rows = seconds[1], exact_rows
        self.switch_cost = INITIAL_SWITCH_COST
        self.ratios = {rows: max(1.0, each / self.single_seconds) for rows, each in seconds.items()}
        # number of recorded passes for each number of rows, without those of the measurement
        self.n_passes: dict[int, int] = {}

    def __call__(self, rows: int) -> float:
        return self.single_seconds * self.ratio(rows)

    def ratio(self, rows: int) -> float:
        """Return T(rows) / T(1), where `rows` is rounded up to a multiple of four. Between and
        beyond measured numbers of rows the ratio is interpolated or extrapolated linearly; it never
        falls with more rows.
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
        """Return the ratio that is assumed when a draft is chosen. For up to four rows it is at
        most OPTIMISTIC_RATIO until such a pass was recorded.
        """
        ratio = self.ratio(rows)
        return (
            ratio
            if rows > ROW_GROUP or ROW_GROUP in self.n_passes
            else min(ratio, OPTIMISTIC_RATIO)
        )

    def record_pass(self, rows: int, seconds: float) -> None:
        """Record the seconds of a pass, of which at most twice the expected time counts. The speed
        of the machine is updated, and with less weight the ratio for this number of rows.
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
        # the measurements of the other numbers of rows were slowed down, too
        if deviation < 0 and not before and ratio > 1:
            cheaper = (now - 1) / (ratio - 1)
            for unused in self.ratios.keys() - self.n_passes.keys() - {1}:
                self.ratios[unused] = 1 + (self.ratios[unused] - 1) * cheaper

    def record_switch(self, seconds: float) -> None:
        """Record the seconds of the first pass of one row after a pass of several rows."""
        self.switch_cost += SPEED_WEIGHT * (
            min(max(0.0, seconds / self.single_seconds - 1), 2 * INITIAL_SWITCH_COST)
            - self.switch_cost
        )


def _whole(rows: int) -> int:
    """Return the next multiple of four, because a pass of that many rows costs as much. 1 stays 1."""
    return rows if rows == 1 else -(-rows // ROW_GROUP) * ROW_GROUP


def measure_pass_cost(context: MeasurableContext, max_rows: int = MAX_PASS_ROWS) -> PassCost:
    """Measure passes of one row and of several rows over the same tokens. The context must be empty
    before, and is empty afterwards.

    A large model gets few passes: four of one row and one of four rows; the cost of more rows is
    extrapolated. If there is more time, each number of rows is measured twice. The fastest pass
    counts, because other programs can only slow passes down.
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
            )  # the limit is the cost of as many single rows
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
