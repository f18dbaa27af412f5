import math
import statistics

import numpy as np
import pytest

from quant.evaluation.divergence import PositionScores
from quant.evaluation.evaluate import EMPTY_SCORES
from quant.evaluation.metrics import compute_metrics, describe_distribution, mean_with_error


def some(count: int = 500) -> PositionScores:
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


def test_means_and_their_errors_are_llama_perplexity_s() -> None:
    values = some().kld
    found = mean_with_error(values)
    assert found.value == pytest.approx(statistics.fmean(values))
    assert found.error == pytest.approx(
        math.sqrt(((values**2).mean() - values.mean() ** 2) / (len(values) - 1))
    )


def test_a_ratio_s_error_counts_what_both_share() -> None:
    scores = some()
    told = compute_metrics(scores).comparison
    assert told
    apart = scores.nll - scores.base_nll
    assert told.log_ratio.value == pytest.approx(apart.mean())
    assert told.log_ratio.error == pytest.approx(apart.std() / math.sqrt(len(apart) - 1))
    assert told.ratio.value == pytest.approx(math.exp(apart.mean()))
    assert told.correlation == pytest.approx(np.corrcoef(scores.nll, scores.base_nll)[0, 1])
    delta = np.exp(-scores.nll) - np.exp(-scores.base_nll)
    assert told.delta_rms.value == pytest.approx(math.sqrt((delta**2).mean()))
    assert told.delta_rms.error == pytest.approx(
        0.5 / told.delta_rms.value * mean_with_error(delta**2).error
    )
    assert told.same_top.value == scores.same_top.mean()
    assert told.kld_draw_error == pytest.approx(0.01 / math.sqrt(len(apart)))


def test_percentiles_lie_between_neighbours_in_proportion() -> None:
    found = describe_distribution(np.array([0.0, 10.0, 20.0, 40.0]), (50.0, 90.0))
    assert (found.minimum, found.maximum, found.median) == (0, 40, 15)
    assert found.percentiles == {50.0: 15.0, 90.0: pytest.approx(34.0)}


def test_a_model_beside_itself_differs_in_nothing() -> None:
    scores = some()
    zero = np.zeros(len(scores.nll))
    told = compute_metrics(PositionScores(scores.nll, scores.nll, zero, zero + 1, zero)).comparison
    assert told
    assert (told.ratio.value, told.ratio.error, told.kld.value, told.delta_rms.value) == (
        1,
        0,
        0,
        0,
    )
    assert (told.same_top.value, told.same_top.error) == (1, 0)
    assert told.correlation == pytest.approx(1)


def test_without_a_base_there_is_a_perplexity_alone() -> None:
    found = compute_metrics(
        PositionScores(np.array([1.0, 2.0]), EMPTY_SCORES, EMPTY_SCORES, EMPTY_SCORES, EMPTY_SCORES)
    )
    assert found.comparison is None
    assert found.perplexity.value == pytest.approx(math.exp(1.5))
