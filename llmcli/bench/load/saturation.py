"""Whether a server falls behind: open requests and waits for the first token both grow, beyond what
chance allows.

After guidellm's over-saturation test: a long queue alone is no sign; a queue that grows while first
tokens come later and later is one. Neighbouring requests meet the same queue and are not
independent, so slopes are fitted to the means of BINS pieces of the run, which nearly are. Both
slopes must be above zero with CONFIDENCE.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean

from llmcli.bench.statistics.student_t import student

BINS = 10
LEAST = 30  # requests below which nothing is said
CONFIDENCE = 0.99
GROWTH = (
    1.5  # times its first value that the fitted line must reach: a slope may be certain and small
)


def growing(times: Sequence[float], waiting: Sequence[float], ttft: Sequence[float]) -> bool:
    """Whether requests, by when they were due, met more and more others and waited longer and
    longer.
    """
    if len(times) < LEAST:
        return False
    order = sorted(range(len(times)), key=times.__getitem__)
    return all(
        _rises([times[at] for at in order], [of[at] for at in order]) for of in (waiting, ttft)
    )


def _rises(times: Sequence[float], values: Sequence[float]) -> bool:
    size = len(times) / BINS
    cuts = [round(number * size) for number in range(BINS + 1)]
    pieces = list(pairwise(cuts))
    x, y = ([fmean(of[start:end]) for start, end in pieces] for of in (times, values))
    middle, mean = fmean(x), fmean(y)
    spread = sum((one - middle) ** 2 for one in x)
    if not spread:
        return False
    slope = sum((a - middle) * (b - mean) for a, b in zip(x, y, strict=True)) / spread
    line = [mean + slope * (one - middle) for one in x]
    rest = sum((b - fit) ** 2 for b, fit in zip(y, line, strict=True))
    error = math.sqrt(rest / (BINS - 2) / spread)
    certain = slope > _quantile() * error
    return certain and line[-1] > GROWTH * max(line[0], 1e-9)


@lru_cache(maxsize=1)
def _quantile() -> float:
    return student(CONFIDENCE, BINS - 2)
