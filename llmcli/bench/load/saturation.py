"""Detection of an overloaded server: open requests and waiting times for the first token both grow
significantly.

A long queue alone is no sign of overload; a growing queue together with growing times to first
token is. Neighboring requests meet the same queue and are not independent, so the slopes are fitted
to the means of N_BINS parts of the run, which nearly are. Both slopes must be above zero with
CONFIDENCE.

Source: guidellm's over-saturation test.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean

from llmcli.bench.statistics.student_t import student_t_quantile

N_BINS = 10
MIN_REQUESTS = 30  # fewer requests give no result
CONFIDENCE = 0.99
# the fitted line must end at this many times its start: a significant slope may still be small
MIN_GROWTH = 1.5


def is_falling_behind(
    times: Sequence[float], waiting: Sequence[float], ttft: Sequence[float]
) -> bool:
    """Return whether the requests, ordered by their due time, met more and more open requests and
    waited longer and longer.

    `times`: due times in seconds. `waiting`: open requests at that time. `ttft`: seconds to the
    first token.
    """
    if len(times) < MIN_REQUESTS:
        return False
    order = sorted(range(len(times)), key=times.__getitem__)
    return all(
        _rises([times[index] for index in order], [series[index] for index in order])
        for series in (waiting, ttft)
    )


def _rises(times: Sequence[float], values: Sequence[float]) -> bool:
    size = len(times) / N_BINS
    cuts = [round(number * size) for number in range(N_BINS + 1)]
    bins = list(pairwise(cuts))
    x, y = ([fmean(series[start:end]) for start, end in bins] for series in (times, values))
    middle, mean = fmean(x), fmean(y)
    spread = sum((bin_time - middle) ** 2 for bin_time in x)
    if not spread:
        return False
    slope = sum((a - middle) * (b - mean) for a, b in zip(x, y, strict=True)) / spread
    line = [mean + slope * (bin_time - middle) for bin_time in x]
    squares = sum((b - fit) ** 2 for b, fit in zip(y, line, strict=True))
    error = math.sqrt(squares / (N_BINS - 2) / spread)
    certain = slope > _quantile() * error
    return certain and line[-1] > MIN_GROWTH * max(line[0], 1e-9)


@lru_cache(maxsize=1)
def _quantile() -> float:
    return student_t_quantile(CONFIDENCE, N_BINS - 2)
