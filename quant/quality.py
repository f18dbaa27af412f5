"""What the scores of a text come to: perplexity, divergence, Δp, with the errors of their means.

Every figure is defined as tools/perplexity/perplexity.cpp (kl_divergence) defines it; sums are
float64.
"""

import math
from dataclasses import dataclass

import numpy as np

from quant.divergence import F64, Scores

KLD_RANKS = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DELTA_RANKS = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How values lie: the ends, the middle, and percentiles by rank."""

    least: float
    most: float
    median: float
    ranks: dict[float, float]


@dataclass(frozen=True, slots=True)
class Against:
    """A model beside its base. `correlation` is that of the mean log-likelihoods; Δp is the change
    of the probability of the token that came; `doubt` is the part of the mean divergence's error
    that comes of a base kept in part.
    """

    base: Estimate
    correlation: float | None
    log_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    kld: Estimate
    klds: Spread
    doubt: float
    delta: Estimate
    deltas: Spread
    delta_rms: Estimate
    same_top: Estimate


@dataclass(frozen=True, slots=True)
class Quality:
    """All figures of one text."""

    positions: int
    perplexity: Estimate
    against: Against | None


def mean(values: F64) -> Estimate:
    """The mean and its standard error."""
    count = len(values)
    return Estimate(
        float(values.mean()), math.sqrt(float(values.var()) / (count - 1)) if count > 1 else 0.0
    )


def quality(scores: Scores) -> Quality:
    """The figures of these positions."""
    nll = mean(scores.nll)
    own = _exponential(nll)
    return Quality(len(scores.nll), own, _against(scores, nll, own) if scores.against else None)


def _exponential(log: Estimate) -> Estimate:
    value = math.exp(min(log.value, 700.0))
    return Estimate(value, value * log.error)


def _against(scores: Scores, nll: Estimate, own: Estimate) -> Against:
    base_nll = mean(scores.base_nll)
    base = _exponential(base_nll)
    count = len(scores.nll)
    covariance = float(
        ((scores.nll - nll.value) * (scores.base_nll - base_nll.value)).mean()
    ) / max(count - 1, 1)
    both = nll.error * base_nll.error
    log_ratio = Estimate(
        nll.value - base_nll.value, _root(nll.error**2 + base_nll.error**2 - 2 * covariance)
    )
    cross = own.value * base.value * covariance
    delta = np.exp(-scores.nll) - np.exp(-scores.base_nll)
    square = mean(delta**2)
    rms = math.sqrt(square.value)
    same = float(scores.same.mean())
    return Against(
        base=base,
        correlation=covariance / both if both else None,
        log_ratio=log_ratio,
        ratio=_exponential(log_ratio),
        difference=Estimate(
            own.value - base.value, _root(own.error**2 + base.error**2 - 2 * cross)
        ),
        kld=mean(scores.kld),
        klds=spread(scores.kld, KLD_RANKS),
        doubt=math.sqrt(float((scores.doubt**2).sum())) / count,
        delta=mean(delta),
        deltas=spread(delta, DELTA_RANKS),
        delta_rms=Estimate(rms, 0.5 / rms * square.error if rms else 0.0),
        same_top=Estimate(same, math.sqrt(same * (1 - same) / max(count - 1, 1))),
    )


def spread(values: F64, ranks: tuple[float, ...]) -> Spread:
    """Percentiles, between neighbours in proportion."""
    found = np.percentile(values, ranks)
    return Spread(
        float(values.min()),
        float(values.max()),
        float(np.median(values)),
        dict(zip(ranks, map(float, found), strict=True)),
    )


def _root(value: float) -> float:
    return math.sqrt(max(value, 0.0))
