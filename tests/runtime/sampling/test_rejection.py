"""Rejection sampling accepts as many guesses as possible without changing the distribution."""

import numpy as np
import pytest

from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.chain import NumpyChain, make_chain
from llmcli.runtime.sampling.rejection import (
    Proposal,
    RejectionChain,
    choose_token,
    draw_index,
)
from tests.fixtures.fakes import FakeModel, FakeRow

CASES = {
    "alike": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
    "apart": ([0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
    "sure": ([0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]),
    "cut": ([0.0, 0.6, 0.4, 0.0], [0.3, 0.3, 0.2, 0.2]),
}


class GivenNumbers:
    """A random number generator that returns the given numbers."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


@pytest.mark.parametrize("case", CASES)
def test_tokens_have_the_distribution_p(case: str):
    """The distribution is computed exactly: over every guess with its probability, and over fine
    grids of the random numbers for the acceptance and for the second draw.
    """
    p, q = (np.array(row, np.float32) for row in CASES[case])
    grid = (np.arange(1000) + 0.5) / 1000
    found = np.zeros(4)
    for guess in np.flatnonzero(q):
        kept = sum(
            choose_token(p, [Proposal(guess, q)], GivenNumbers(u, 0.5)) == guess
            and u * q[guess] < p[guess]
            for u in grid
        ) / len(grid)
        found[guess] += q[guess] * kept
        if kept < 1:
            redrawn = [
                choose_token(p, [Proposal(guess, q)], GivenNumbers(0.9999999, u)) for u in grid
            ]
            found += q[guess] * (1 - kept) * np.bincount(redrawn, minlength=4) / len(grid)
    assert found == pytest.approx(p, abs=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_guesses_are_accepted_with_the_largest_possible_probability(case: str):
    p, q = (np.array(row, np.float32) for row in CASES[case])
    random = np.random.default_rng(3)
    kept = 0
    for _ in range(4000):
        guess = draw_index(q, random)
        kept += choose_token(p, [Proposal(guess, q)], random) == guess
    assert kept / 4000 == pytest.approx(np.minimum(p, q).sum(), abs=0.04)


def without(q: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Return the distribution of a further draw from q that differs from `tokens`."""
    rest = q.copy()
    rest[tokens] = 0
    return rest / rest.sum()


def propose(kind: str, q: np.ndarray, random: np.random.Generator) -> list[Proposal]:
    """Return several guesses of one token: draws from q that may be equal, draws that differ, draws
    from two drafters, guesses that were not drawn, or a mixture.
    """
    other = q[::-1].copy()
    first = draw_index(q, random)
    if kind == "equal draws":
        return [Proposal(first, q), *(Proposal(draw_index(q, random), q) for _ in range(2))]
    if kind == "different draws":
        rest = without(q, [first])
        return [Proposal(first, q), Proposal(draw_index(rest, random), rest)]
    if kind == "two drafters":
        return [Proposal(first, q), Proposal(draw_index(other, random), other)]
    if kind == "not drawn":
        return [Proposal(2, None), Proposal(1, None)]
    return [Proposal(first, q), Proposal(3, None), Proposal(draw_index(other, random), other)]


@pytest.mark.parametrize(
    "kind", ["equal draws", "different draws", "two drafters", "not drawn", "mixed"]
)
def test_several_guesses_do_not_change_the_distribution(kind: str):
    p, q = (np.array(row, np.float32) for row in ([0.4, 0.35, 0.05, 0.2], [0.1, 0.2, 0.4, 0.3]))
    random, count = np.random.default_rng(11), 20_000
    found = np.zeros(4)
    n_accepted = 0
    for _ in range(count):
        proposals = propose(kind, q, random)
        token = choose_token(p, proposals, random)
        found[token] += 1
        n_accepted += token in [proposal.token for proposal in proposals]
    statistic = ((found - count * p) ** 2 / (count * p)).sum()
    assert statistic < 16.27, found / count  # chi-square, 3 degrees of freedom, p = 0.001
    if kind != "not drawn":  # more often than a single guess
        assert n_accepted / count > np.minimum(p, q).sum()


def test_draw_never_returns_an_index_of_weight_0():
    weights = np.array([0.0, 0.5, 0.5, 0.0], np.float32)
    assert draw_index(weights, GivenNumbers(0.0)) == 1
    assert draw_index(weights, GivenNumbers(1.0 - 1e-16)) == 2


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
def test_reported_probabilities_are_those_of_the_draws(values: dict[str, float]):
    """Guesses drawn from the reported distribution itself are all accepted, and draws of the chain
    have the same distribution.
    """
    logits = np.random.default_rng(5).normal(0, 3, 40).astype(np.float32)
    row, sampling = FakeRow(logits), default_sampling().with_values({**values, "seed": 1})
    chain = make_chain(sampling, 1, None, FakeModel())
    assert isinstance(chain, NumpyChain)
    rejection_chain, random = RejectionChain(chain), np.random.default_rng(9)
    for _ in range(20):
        probabilities = chain.probabilities(row, [])
        assert probabilities.sum() == pytest.approx(1, abs=1e-5)
        guess = draw_index(probabilities, random)
        rejection_chain.proposals = [Proposal(guess, probabilities)]
        assert rejection_chain.draw(row, []) == guess
        assert not rejection_chain.proposals
    counts = np.zeros(40)
    chain = make_chain(sampling, 1, None, FakeModel())
    probabilities = chain.probabilities(row, [])
    for seed in range(300):
        counts[make_chain(sampling, seed, None, FakeModel()).draw(row, [])] += 1
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(probabilities))
    assert np.abs(counts / 300 - probabilities).max() < 0.15
