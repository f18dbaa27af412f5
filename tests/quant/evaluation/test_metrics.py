"""Perplexities, ratios, divergences and their standard errors, computed from position scores."""

import math
import statistics

import numpy as np
import pytest

from quant.evaluation.divergence import PositionScores
from quant.evaluation.evaluate import EMPTY_SCORES
from quant.evaluation.metrics import compute_metrics, describe_distribution, mean_with_error


def random_scores(count: int = 500) -> PositionScores:
    random = np.random.default_rng(3)
    base = random.exponential(2, count)
    nll = base + random.normal(0.1, 0.3, count)
    return PositionScores(
        nll,
        base,
        random.exponential(0.05, count),
        (random.random(count) < 0.8) * 1.0,
        np.full(count, 0.01),
    )


def test_means_and_errors_equal_those_of_llama_perplexity() -> None:
    values = random_scores().kld
    mean = mean_with_error(values)
    assert mean.value == pytest.approx(statistics.fmean(values))
    assert mean.error == pytest.approx(
        math.sqrt(((values**2).mean() - values.mean() ** 2) / (len(values) - 1))
    )


def test_error_of_the_ratio_accounts_for_correlation() -> None:
    scores = random_scores()
    comparison = compute_metrics(scores).comparison
    assert comparison
    differences = scores.nll - scores.base_nll
    assert comparison.log_ratio.value == pytest.approx(differences.mean())
    assert comparison.log_ratio.error == pytest.approx(
        differences.std() / math.sqrt(len(differences) - 1)
    )
    assert comparison.ratio.value == pytest.approx(math.exp(differences.mean()))
    assert comparison.correlation == pytest.approx(np.corrcoef(scores.nll, scores.base_nll)[0, 1])
    delta = np.exp(-scores.nll) - np.exp(-scores.base_nll)
    assert comparison.delta_rms.value == pytest.approx(math.sqrt((delta**2).mean()))
    assert comparison.delta_rms.error == pytest.approx(
        0.5 / comparison.delta_rms.value * mean_with_error(delta**2).error
    )
    assert comparison.same_top.value == scores.same_top.mean()
    assert comparison.kld_draw_error == pytest.approx(0.01 / math.sqrt(len(differences)))


def test_percentiles_are_interpolated_linearly() -> None:
    distribution = describe_distribution(np.array([0.0, 10.0, 20.0, 40.0]), (50.0, 90.0))
    assert (distribution.minimum, distribution.maximum, distribution.median) == (0, 40, 15)
    assert distribution.percentiles == {50.0: 15.0, 90.0: pytest.approx(34.0)}


def test_model_compared_with_itself_has_no_difference() -> None:
    scores = random_scores()
    zero = np.zeros(len(scores.nll))
    comparison = compute_metrics(
        PositionScores(scores.nll, scores.nll, zero, zero + 1, zero)
    ).comparison
    assert comparison
    assert (
        comparison.ratio.value,
        comparison.ratio.error,
        comparison.kld.value,
        comparison.delta_rms.value,
    ) == (
        1,
        0,
        0,
        0,
    )
    assert (comparison.same_top.value, comparison.same_top.error) == (1, 0)
    assert comparison.correlation == pytest.approx(1)


def test_without_a_base_there_is_only_a_perplexity() -> None:
    metrics = compute_metrics(
        PositionScores(np.array([1.0, 2.0]), EMPTY_SCORES, EMPTY_SCORES, EMPTY_SCORES, EMPTY_SCORES)
    )
    assert metrics.comparison is None
    assert metrics.perplexity.value == pytest.approx(math.exp(1.5))
