"""Metrics of a text's scores: perplexity, divergence and Δp, with the standard errors of their
means.

Every metric is defined as in tools/perplexity/perplexity.cpp (kl_divergence); sums are float64.
"""

import math
from dataclasses import dataclass

import numpy as np

from quant.evaluation.divergence import F64, Scores

KLD_RANKS = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DELTA_RANKS = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of values: minimum, maximum, median, and percentiles by rank."""

    least: float
    most: float
    median: float
    ranks: dict[float, float]


@dataclass(frozen=True, slots=True)
class Against:
    """Comparison of a model with its base.

    `correlation` is that of the mean log-likelihoods; Δp is the change of the probability of the
    next token; `kld_draw_error` is the part of the mean divergence's error that is due to stored
    base logits.
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
    """All metrics of one text."""

    positions: int
    perplexity: Estimate
    against: Against | None


def mean(values: F64) -> Estimate:
    """Return the mean and its standard error."""
    count = len(values)
    return Estimate(
        float(values.mean()), math.sqrt(float(values.var()) / (count - 1)) if count > 1 else 0.0
    )


def quality(scores: Scores) -> Quality:
    """Return the metrics of these positions."""
    nll = mean(scores.nll)
    perplexity = _exponentiate(nll)
    return Quality(
        len(scores.nll), perplexity, _compare(scores, nll, perplexity) if scores.against else None
    )


def _exponentiate(log: Estimate) -> Estimate:
    value = math.exp(min(log.value, 700.0))
    return Estimate(value, value * log.error)


def _compare(scores: Scores, nll: Estimate, own: Estimate) -> Against:
    base_nll = mean(scores.base_nll)
    base = _exponentiate(base_nll)
    count = len(scores.nll)
    covariance = float(
        ((scores.nll - nll.value) * (scores.base_nll - base_nll.value)).mean()
    ) / max(count - 1, 1)
    error_product = nll.error * base_nll.error
    log_ratio = Estimate(
        nll.value - base_nll.value, _root(nll.error**2 + base_nll.error**2 - 2 * covariance)
    )
    cross = own.value * base.value * covariance
    delta = np.exp(-scores.nll) - np.exp(-scores.base_nll)
    square = mean(delta**2)
    rms = math.sqrt(square.value)
    same_top = float(scores.same.mean())
    return Against(
        base=base,
        correlation=covariance / error_product if error_product else None,
        log_ratio=log_ratio,
        ratio=_exponentiate(log_ratio),
        difference=Estimate(
            own.value - base.value, _root(own.error**2 + base.error**2 - 2 * cross)
        ),
        kld=mean(scores.kld),
        klds=spread(scores.kld, KLD_RANKS),
        doubt=math.sqrt(float((scores.doubt**2).sum())) / count,
        delta=mean(delta),
        deltas=spread(delta, DELTA_RANKS),
        delta_rms=Estimate(rms, 0.5 / rms * square.error if rms else 0.0),
        same_top=Estimate(same_top, math.sqrt(same_top * (1 - same_top) / max(count - 1, 1))),
    )


def spread(values: F64, ranks: tuple[float, ...]) -> Spread:
    """Return the distribution of values, with percentiles interpolated between neighbors."""
    percentiles = np.percentile(values, ranks)
    return Spread(
        float(values.min()),
        float(values.max()),
        float(np.median(values)),
        dict(zip(ranks, map(float, percentiles), strict=True)),
    )


def _root(value: float) -> float:
    return math.sqrt(max(value, 0.0))
