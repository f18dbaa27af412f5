"""Rejection sampling accepts as many drafts as possible and keeps the distribution."""

import numpy as np
import pytest

from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.chain import NumpyChain, make_chain
from llmcli.runtime.sampling.rejection import RejectionChain, draw_index, keep_or_redraw
from tests.fixtures.fakes import FakeModel, FakeRow

CASES = {
    "alike": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
    "apart": ([0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
    "sure": ([0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]),
    "cut": ([0.0, 0.6, 0.4, 0.0], [0.3, 0.3, 0.2, 0.2]),
}


class Dial:
    """Random numbers that are given."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


@pytest.mark.parametrize("case", CASES)
def test_over_all_random_numbers_the_token_is_distributed_as_p(case: str):
    """Exact: every guess with its probability, every first number of a fine grid, every second one."""
    p, q = (np.array(row, np.float32) for row in CASES[case])
    grid = (np.arange(1000) + 0.5) / 1000
    found = np.zeros(4)
    for guess in np.flatnonzero(q):
        kept = sum(
            keep_or_redraw(p, q, guess, Dial(u, 0.5)) == guess and u * q[guess] < p[guess]
            for u in grid
        ) / len(grid)
        found[guess] += q[guess] * kept
        if kept < 1:
            instead = [keep_or_redraw(p, q, guess, Dial(0.9999999, u)) for u in grid]
            found += q[guess] * (1 - kept) * np.bincount(instead, minlength=4) / len(grid)
    assert found == pytest.approx(p, abs=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_guess_is_kept_as_often_as_can_be(case: str):
    p, q = (np.array(row, np.float32) for row in CASES[case])
    random = np.random.default_rng(3)
    kept = 0
    for _ in range(4000):
        guess = draw_index(q, random)
        kept += keep_or_redraw(p, q, guess, random) == guess
    assert kept / 4000 == pytest.approx(np.minimum(p, q).sum(), abs=0.04)


def test_a_draw_never_takes_what_cannot_be():
    weights = np.array([0.0, 0.5, 0.5, 0.0], np.float32)
    assert draw_index(weights, Dial(0.0)) == 1
    assert draw_index(weights, Dial(1.0 - 1e-16)) == 2


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temp": 1.3, "top_k": 5},
        {"xtc_probability": 1.0, "temp": 1},
        {"mirostat": 1, "temp": 1},
        {"mirostat": 2},
    ],
)
def test_the_distribution_told_is_the_one_drawn_from(values: dict[str, float]):
    """Guesses drawn from the told distribution itself are all kept, and a chain that only draws
    learns the same.
    """
    logits = np.random.default_rng(5).normal(0, 3, 40).astype(np.float32)
    row, sampling = FakeRow(logits), default_sampling().with_values({**values, "seed": 1})
    chain = make_chain(sampling, 1, None, FakeModel())
    assert isinstance(chain, NumpyChain)
    matching, random = RejectionChain(chain), np.random.default_rng(9)
    for _ in range(20):
        odds = chain.probabilities(row, [])
        assert odds.sum() == pytest.approx(1, abs=1e-5)
        guess = draw_index(odds, random)
        matching.expected = guess, odds
        assert matching.draw(row, []) == guess
        assert matching.expected is None
    counts = np.zeros(40)
    fresh = make_chain(sampling, 1, None, FakeModel())
    odds = fresh.probabilities(row, [])
    for seed in range(300):
        counts[make_chain(sampling, seed, None, FakeModel()).draw(row, [])] += 1
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(odds))
    assert np.abs(counts / 300 - odds).max() < 0.15
