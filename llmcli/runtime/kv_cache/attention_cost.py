"""Measures by how much the cells of other sequences prolong a row of a pass.

For each row llama.cpp's attention visits every used cell of the pool. Whether a masked cell costs
time depends on the back end, on flash attention and on the model. This is measured from passes that
are computed anyway: by least squares, with the seconds of a row as a linear function of the row's
own cells and of the other cells. Older passes count less and less.
"""

import math
import statistics

DECAY = 0.99  # factor of the weight of all earlier passes for each new one
MIN_WEIGHT = 12.0  # weight of the passes from which an estimate is made
SIGNIFICANT_ERRORS = 2.0  # standard errors that are subtracted from an estimate
MIN_VARIATION = 1e-6  # smallest part of the variation of the other cells that must be their own
MIN_COST = 1e-8  # smallest cost of a cell, as a share of a row; less is a rounding error
SINGLE_PASSES = 64  # passes of one row whose median is recorded
MIN_SINGLE_PASSES = 4
MAX_SLOWDOWN = 4  # a pass that exceeds the mean by more was slowed down by other programs


class AttentionCost:
    """The estimated seconds by which one cell of another sequence prolongs one row."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._means = [0.0, 0.0, 0.0]  # own cells, other cells, seconds of a row
        # sums of the products of the deviations from the means
        self._sums = {(i, j): 0.0 for i in range(3) for j in range(i, 3)}

    def record(self, own_cells: float, other_cells: float, row_seconds: float) -> None:
        """Record a pass. `own_cells`: cells of the sequence of a row, on average over the rows.
        `other_cells`: all other used cells. `row_seconds`: seconds of the pass per row.
        """
        if self._weight > MIN_WEIGHT:
            row_seconds = min(row_seconds, MAX_SLOWDOWN * self._means[2])
        values = own_cells, other_cells, row_seconds
        old_weight = DECAY * self._weight
        self._weight = old_weight + 1
        deviations = [value - mean for value, mean in zip(values, self._means, strict=True)]
        share = old_weight / self._weight
        for i, j in self._sums:
            self._sums[i, j] = DECAY * self._sums[i, j] + share * deviations[i] * deviations[j]
        for index, deviation in enumerate(deviations):
            self._means[index] += deviation / self._weight

    @property
    def is_measured(self) -> bool:
        """Return whether enough passes beside different numbers of other cells were recorded."""
        return self._estimate() is not None

    @property
    def cell_seconds(self) -> float:
        """Return the seconds that another cell costs a row at least, with statistical confidence.
        The result is 0 when there are too few measurements, or when the cost is lost in their
        noise.
        """
        estimate = self._estimate()
        if estimate is None:
            return 0.0
        slope, error = estimate
        least = slope - SIGNIFICANT_ERRORS * error
        return least if least > MIN_COST * self._means[2] else 0.0

    def _estimate(self) -> tuple[float, float] | None:
        """Return the seconds per other cell and row, and the standard error. Return None when they
        are unknown.
        """
        if self._weight < MIN_WEIGHT:
            return None
        sums = self._sums
        own, both, other, own_seconds = sums[0, 0], sums[0, 1], sums[1, 1], sums[0, 2]
        if own <= 0:  # the own cells were always equally many
            own, both, own_seconds = 1.0, 0.0, 0.0
        rest = other - both * both / own  # what the own cells do not explain
        if rest <= MIN_VARIATION * max(1.0, other):
            return None
        slope = (sums[1, 2] - both * own_seconds / own) / rest
        own_slope = (own_seconds - slope * both) / own
        unexplained = max(0.0, sums[2, 2] - slope * sums[1, 2] - own_slope * own_seconds)
        return slope, math.sqrt(unexplained / max(1.0, self._weight - 3) / rest)


class SinglePassTimes:
    """Collects the times of consecutive passes of one row, and records their median. This is cheap
    for each pass, and the median is free of interruptions.
    """

    def __init__(self, cost: AttentionCost) -> None:
        self._cost = cost
        self._seconds: list[float] = []
        self._own_cells = self._other_cells = 0  # at the first of the passes

    def add(self, own_cells: int, used_cells: int, seconds: float) -> None:
        """Add a pass. `own_cells`: cells of its sequence. `used_cells`: cells of all sequences."""
        if not self._seconds:
            self._own_cells, self._other_cells = own_cells, used_cells - own_cells
        self._seconds.append(seconds)
        if len(self._seconds) == SINGLE_PASSES:
            self.flush()

    def flush(self) -> None:
        """Record the passes so far, because the next one is different."""
        count = len(self._seconds)
        if count >= MIN_SINGLE_PASSES:
            own_cells = self._own_cells + count / 2
            self._cost.record(own_cells, self._other_cells, statistics.median(self._seconds))
        self._seconds.clear()
