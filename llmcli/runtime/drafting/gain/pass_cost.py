"""The cost T(m) of a forward pass of m rows. It is measured when a model is loaded, and updated
with the passes of answers.

llama.cpp multiplies quantized weights with four rows at a time, so only one row and multiples of
four are measured. The measurement also shows whether the logits of a row depend on the number of
rows.
"""

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np

from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.sampling.chain import RowLogits

PASS_ROWS = (4, 8, 12, 16)  # numbers of rows of a pass with drafts
MAX_PASS_ROWS = PASS_ROWS[-1]
MIN_SINGLE_PASSES = 4  # minimum number of passes of one row in the measurement
# Maximum seconds of the measurement: MEASURE_SECONDS, or for a large model the time of this many
# passes of one row, which is enough for 4, 16 and 8 rows, but at most MAX_MEASURE_SECONDS.
MEASURE_SECONDS, MEASURE_PASSES, MAX_MEASURE_SECONDS = 0.25, 28, 2.0
SPEED_WEIGHT = 0.1  # weight of a new pass in the moving average of the speed
# weight of a new pass of several rows in the moving average of its ratio to one row
RATIO_WEIGHT = 0.05
# Until a draft was tried, T(4) / T(1) is assumed to be at most this much: with a larger ratio,
# drafting has saved no time on any tested machine.
OPTIMISTIC_RATIO = 2.7
INITIAL_SWITCH_COST = 0.2  # as a fraction of the time of a pass of one row
ROW_GROUP = 4  # rows that llama.cpp multiplies at a time; remaining rows are computed one by one


class MeasurableContext(Protocol):
    """The methods and sizes of a context that the measurement uses. The context must be empty."""

    n_vocab: int
    n_ctx: int
    n_outputs: int

    def decode(self, rows: BatchRows) -> Iterable[RowLogits]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class MeasuredPasses:
    """A measurement of passes, which another load of the model can use: the `seconds` of a pass by
    its number of rows, with one row among them, and `exact_rows` as in PassCost.
    """

    seconds: Mapping[int, float]
    exact_rows: int


class PassCost:
    """The expected seconds of a pass by its number of rows. For one row they are `single_seconds`,
    and for more rows `single_seconds` times a ratio.

    The speed of the machine changes all times from second to second, while the ratios change slowly
    as the context grows. Therefore they are tracked separately.

    - `switch_cost`: the additional time of the first pass of one row after a pass of several rows,
      as a fraction of `single_seconds`. llama.cpp then builds its graph again.
    - `checkpoint_seconds`: the time of taking a checkpoint before a draft; 0 until one was taken.
      Going back to it is assumed to take as long.
    - `exact_rows`: up to this many rows in a pass, the rows that were compared, at least the first
      four, had bit-equal logits to passes of one row.

    Other programs may slow down the few measured passes of several rows while the model is loaded,
    and drafting would then seem too expensive. For this reason a short draft is tried once in any
    case. A pass that is faster than expected gets a larger weight than a slower one, because other
    programs can only slow passes down.
    """

    def __init__(self, seconds: Mapping[int, float], exact_rows: int = 0) -> None:
        """`seconds`: the measured seconds of a pass for some numbers of rows, including one row."""
        self.measured = MeasuredPasses(dict(seconds), exact_rows)
        self.single_seconds, self.exact_rows = seconds[1], exact_rows
        self.switch_cost, self.checkpoint_seconds = INITIAL_SWITCH_COST, 0.0
        self.ratios = {
            rows: max(1.0, duration / self.single_seconds) for rows, duration in seconds.items()
        }
        # number of recorded passes for each number of rows, without those of the measurement
        self.n_passes: dict[int, int] = {}

    def __call__(self, rows: int) -> float:
        """Return the expected seconds of a pass of `rows` rows."""
        return self.single_seconds * self.ratio(rows)

    def ratio(self, rows: int) -> float:
        """Return T(rows) / T(1). `rows` is rounded up to a multiple of four. Ratios that were not
        measured are interpolated or extrapolated linearly, so that they never fall with more rows.
        """
        rows = round_up_rows(rows)
        measured = self.ratios.get(rows)
        if measured is not None:
            return measured
        measured_rows = sorted(self.ratios)
        low = max((count for count in measured_rows if count < rows), default=measured_rows[0])
        high = min((count for count in measured_rows if count > rows), default=low)
        if high == low:
            low = measured_rows[max(0, measured_rows.index(high) - 1)]
        if high == low:
            return self.ratios[low] * rows / low
        slope = max(0.0, (self.ratios[high] - self.ratios[low]) / (high - low))
        return self.ratios[low] + slope * (rows - low)

    def optimistic_ratio(self, rows: int) -> float:
        """Return the ratio that is assumed when the length of a draft is chosen. It is T(rows) /
        T(1), but for up to four rows at most OPTIMISTIC_RATIO until such a pass was recorded.
        """
        ratio = self.ratio(rows)
        return (
            ratio
            if rows > ROW_GROUP or ROW_GROUP in self.n_passes
            else min(ratio, OPTIMISTIC_RATIO)
        )

    def record_pass(self, rows: int, seconds: float) -> None:
        """Update the speed of the machine, and with less weight the ratio for this number of rows,
        by a pass that took `seconds`. At most twice the expected time counts.
        """
        single = self.single_seconds
        if rows == 1:
            self.single_seconds = average_seconds(single, seconds)
            return
        ratio = self.ratio(rows)
        deviation = min(seconds / (single * ratio), 2.0) - 1
        self.single_seconds = single * (1 + SPEED_WEIGHT * deviation)
        rows = round_up_rows(rows)
        n_before = self.n_passes.get(rows, 0)
        self.n_passes[rows] = n_before + 1
        weight = max(RATIO_WEIGHT, 1 / (2 + n_before)) if deviation < 0 else RATIO_WEIGHT
        self.ratios[rows] = new_ratio = max(1.0, ratio * (1 + weight * deviation))
        # the measurements for the other numbers of rows were probably slowed down as much
        if deviation < 0 and not n_before and ratio > 1:
            factor = (new_ratio - 1) / (ratio - 1)
            for unused in self.ratios.keys() - self.n_passes.keys() - {1}:
                self.ratios[unused] = 1 + (self.ratios[unused] - 1) * factor

    def record_switch(self, seconds: float) -> None:
        """Update `switch_cost` by the first pass of one row after a pass of several rows, which
        took `seconds`.
        """
        self.switch_cost += SPEED_WEIGHT * (
            min(max(0.0, seconds / self.single_seconds - 1), 2 * INITIAL_SWITCH_COST)
            - self.switch_cost
        )

    def record_checkpoint(self, seconds: float) -> None:
        """Update `checkpoint_seconds` by a checkpoint that took `seconds`. At most twice the expected
        time counts.
        """
        self.checkpoint_seconds = average_seconds(self.checkpoint_seconds or seconds, seconds)


def average_seconds(expected: float, seconds: float) -> float:
    """Return the moving average `expected` after another measurement. At most twice the expected
    time counts, because other programs can only slow the machine down.
    """
    return expected + SPEED_WEIGHT * (min(seconds, 2 * expected) - expected)


def round_up_rows(rows: int) -> int:
    """Return the next multiple of four, because a pass of so many rows costs the same. 1 stays
    1.
    """
    return rows if rows == 1 else -(-rows // ROW_GROUP) * ROW_GROUP


def measure_pass_cost(context: MeasurableContext, max_rows: int = MAX_PASS_ROWS) -> PassCost:
    """Measure passes of one row and of several rows over the same tokens. The context must be
    empty, and is empty again afterwards.

    A large model gets only few passes: four of one row, one of four rows, and if there is time
    another of four rows, on which the decision to draft depends, and one of the most rows, because
    the costs do not lie on the line through one row and four. The others are interpolated or
    extrapolated. If there is more time, each number of rows is measured again. The fastest pass
    counts, because other programs can only slow passes down.
    """
    tokens = np.random.default_rng(0).integers(0, context.n_vocab, max_rows).tolist()
    _pass(context, tokens[:1], 0)  # the first pass reads the weights from disk
    context.trim(0, 0)
    start_time = time.perf_counter()
    single_rows, times = [], []
    for position in range(max_rows):
        seconds, rows = _pass(context, tokens[position : position + 1], position)
        times.append(seconds)
        single_rows += rows
        is_late = time.perf_counter() - start_time > MEASURE_SECONDS / 3
        if position + 1 >= MIN_SINGLE_PASSES and is_late:
            break
    context.trim(0, 0)
    budget = max(MEASURE_SECONDS, min(MEASURE_PASSES * min(times), MAX_MEASURE_SECONDS))
    widths = [width for width in PASS_ROWS if width <= max_rows]
    order = [*widths[:1] * 2, *widths[:0:-1][:1], *widths[1:-1]]  # 4, 4, 16, 8, 12
    times_by_rows = {1: min(times)}
    exact_widths: set[int] = set()
    for widths_of_round in (order, widths):
        for width in widths_of_round:
            elapsed = time.perf_counter() - start_time
            out_of_time = elapsed + PassCost(times_by_rows)(width) > budget
            # A pass that saved nothing may have been slowed down, so it is repeated in any case.
            is_needed = width == PASS_ROWS[0] and (
                times_by_rows.get(width, math.inf) >= width * times_by_rows[1]
            )
            if out_of_time and not is_needed:
                return PassCost(times_by_rows, _count_exact_rows(exact_widths))
            seconds, rows = _pass(context, tokens[:width], 0)
            context.trim(0, 0)
            # at most the time of as many passes of one row
            slowest = times_by_rows.get(width, width * times_by_rows[1])
            if width not in times_by_rows and _are_equal(rows, single_rows):
                exact_widths.add(width)
            times_by_rows[width] = min(seconds, slowest)
    return PassCost(times_by_rows, _count_exact_rows(exact_widths))


def _count_exact_rows(exact_widths: Collection[int]) -> int:
    """Return the largest number of rows up to which every number in PASS_ROWS was measured and had
    logits equal to those of single rows; 0 if not even the smallest had.
    """
    exact = takewhile(lambda width: width in exact_widths, PASS_ROWS)
    return max(exact, default=0)


def _pass(
    context: MeasurableContext, tokens: Sequence[int], start: int
) -> tuple[float, list[np.ndarray]]:
    """Compute `tokens` from position `start` on. Return the seconds of the pass, and a copy of the
    logits of each row.
    """
    count = len(tokens)
    start_time = time.perf_counter()
    rows = list(
        context.decode(BatchRows(tokens, range(start, start + count), [0] * count, [True] * count))
    )
    return time.perf_counter() - start_time, [row.logits.copy() for row in rows]


def _are_equal(rows: list[np.ndarray], single_rows: list[np.ndarray]) -> bool:
    """Return whether the logits of each row are bit-equal to those of the same token in a pass of
    one row. Of a slow model, only the first rows were computed alone.
    """
    return all(np.array_equal(row, single) for row, single in zip(rows, single_rows, strict=False))
