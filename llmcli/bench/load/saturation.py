"""Detection of an overloaded server: both the number of open requests and the time to first token
grow significantly during the run.

A long queue alone is no sign of overload. Requests that arrive close together meet the same queue,
so their values are not independent. Therefore the run is divided into N_BINS bins, and a line is
fitted to the means of the bins, which are nearly independent. The slopes of both lines must be
above zero with a confidence of CONFIDENCE.

Source: guidellm's over-saturation test.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean

from llmcli.bench.statistics.student_t import student_t_quantile

N_BINS = 10
MIN_REQUESTS = 30  # minimum number of requests; with fewer, a server never counts as overloaded
CONFIDENCE = 0.99
# The fitted line must end at least at this multiple of its start, because even a negligible slope
# can be significant.
MIN_GROWTH = 1.5


def is_falling_behind(
    times: Sequence[float], waiting: Sequence[float], ttft: Sequence[float]
) -> bool:
    """Return whether the server is overloaded: the number of open requests and the time to first
    token both grow significantly during the run.

    Each sequence has one value per request, in the same order. `times`: when the request was due,
    in seconds. `waiting`: the number of other requests that were open at that time. `ttft`: the
    seconds until its first token.
    """
    if len(times) < MIN_REQUESTS:
        return False
    order = sorted(range(len(times)), key=times.__getitem__)
    return all(
        _rises([times[index] for index in order], [series[index] for index in order])
        for series in (waiting, ttft)
    )


def _rises(times: Sequence[float], values: Sequence[float]) -> bool:
    """Return whether a line through the means of N_BINS bins rises significantly and by enough.
    `times` must be sorted.
    """
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
