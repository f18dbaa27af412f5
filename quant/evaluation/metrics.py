"""The metrics of a text: perplexity, divergence and Δp, computed from the scores of its positions,
with standard errors.

Every metric is defined as in kl_divergence() of tools/perplexity/perplexity.cpp. Sums are float64.
"""

import math
from dataclasses import dataclass

import numpy as np

from quant.evaluation.divergence import F64, PositionScores

KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DELTA_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, or a value computed from means, with its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a score over all positions. `percentiles` maps ranks in percent (99.9) to
    values.
    """

    minimum: float
    maximum: float
    median: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class BaseComparison:
    """The comparison of a model with its base on one text.

    - `base`: the base's perplexity.
    - `log_ratio`, `ratio`, `difference`: the model's perplexity relative to the base's: ln(model /
      base), model / base and model − base.
    - `correlation`: correlation of the two models' mean log-likelihoods; None if either has no
      variance.
    - `kld`, `klds`: mean and distribution of the divergence from the base.
    - `kld_draw_error`: the part of the standard error of `kld` that is due to drawn tokens in
      stored base logits.
    - `delta`, `deltas`, `delta_rms`: mean, distribution and RMS of Δp, the model's probability of
      the next token minus the base's.
    - `same_top`: the share of positions at which model and base have the same likeliest token.
    """

    base: Estimate
    correlation: float | None
    log_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    kld: Estimate
    klds: Distribution
    kld_draw_error: float
    delta: Estimate
    deltas: Distribution
    delta_rms: Estimate
    same_top: Estimate


@dataclass(frozen=True, slots=True)
class TextMetrics:
    """All metrics of one text with `positions` scored positions. `comparison` is None without a
    base.
    """

    positions: int
    perplexity: Estimate
    comparison: BaseComparison | None


def mean_with_error(values: F64) -> Estimate:
    """Return the mean of values and its standard error, which is 0 for a single value."""
    count = len(values)
    return Estimate(
        float(values.mean()), math.sqrt(float(values.var()) / (count - 1)) if count > 1 else 0.0
    )


def compute_metrics(scores: PositionScores) -> TextMetrics:
    """Return the metrics of a text, given the scores of its positions."""
    nll = mean_with_error(scores.nll)
    perplexity = _exponentiate(nll)
    return TextMetrics(
        len(scores.nll), perplexity, _compare(scores, nll, perplexity) if scores.has_base else None
    )


def _exponentiate(log: Estimate) -> Estimate:
    """Return e to the power of an estimate. The power is limited so that it does not overflow."""
    value = math.exp(min(log.value, 700.0))
    return Estimate(value, value * log.error)


def _compare(scores: PositionScores, nll: Estimate, perplexity: Estimate) -> BaseComparison:
    """Return the comparison with the base. `nll` and `perplexity` are the model's own estimates."""
    base_nll = mean_with_error(scores.base_nll)
    base = _exponentiate(base_nll)
    count = len(scores.nll)
    covariance = float(
        ((scores.nll - nll.value) * (scores.base_nll - base_nll.value)).mean()
    ) / max(count - 1, 1)
    error_product = nll.error * base_nll.error
    log_ratio = Estimate(
        nll.value - base_nll.value, _root(nll.error**2 + base_nll.error**2 - 2 * covariance)
    )
    cross = perplexity.value * base.value * covariance
    delta = np.exp(-scores.nll) - np.exp(-scores.base_nll)
    square = mean_with_error(delta**2)
    rms = math.sqrt(square.value)
    same_top = float(scores.same_top.mean())
    return BaseComparison(
        base=base,
        correlation=covariance / error_product if error_product else None,
        log_ratio=log_ratio,
        ratio=_exponentiate(log_ratio),
        difference=Estimate(
            perplexity.value - base.value, _root(perplexity.error**2 + base.error**2 - 2 * cross)
        ),
        kld=mean_with_error(scores.kld),
        klds=describe_distribution(scores.kld, KLD_PERCENTILES),
        kld_draw_error=math.sqrt(float((scores.kld_error**2).sum())) / count,
        delta=mean_with_error(delta),
        deltas=describe_distribution(delta, DELTA_PERCENTILES),
        delta_rms=Estimate(rms, 0.5 / rms * square.error if rms else 0.0),
        same_top=Estimate(same_top, math.sqrt(same_top * (1 - same_top) / max(count - 1, 1))),
    )


def describe_distribution(values: F64, ranks: tuple[float, ...]) -> Distribution:
    """Return the distribution of values, with their percentiles at `ranks`, which are interpolated
    between neighboring values.
    """
    percentiles = np.percentile(values, ranks)
    return Distribution(
        float(values.min()),
        float(values.max()),
        float(np.median(values)),
        dict(zip(ranks, map(float, percentiles), strict=True)),
    )


def _root(value: float) -> float:
    """Return the square root of a variance, which rounding can make slightly negative."""
    return math.sqrt(max(value, 0.0))
