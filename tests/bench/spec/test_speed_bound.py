"""The bound against a simulation of drafting with shorter drafts, and where drafts break even."""

import random

import pytest

from llmcli.bench.spec.speed_bound import SHORTEST_DRAFT, find_bound, guess_seconds
from llmcli.runtime.drafting.gain.pass_cost import PASS_ROWS, PassCost
from llmcli.runtime.requests.draft_counts import DraftCounts, DraftTally

DEPTH = PASS_ROWS[-1] - 1
TOO_SLOW = 1000.0


def simulate(is_right: list[bool], n_guesses: int) -> tuple[DraftCounts, int]:
    """Draft `n_guesses` tokens before each pass over a text. `is_right`: whether the guess of each
    token is right. Return the counts and the number of passes.
    """
    tally, start, n_passes = DraftTally("x"), 0, 0
    while start < len(is_right):
        n_right = 0
        while n_right < n_guesses and is_right[start + n_right]:
            n_right += 1
        tally.record(n_guesses, min(n_guesses, n_right + 1), n_right, 0.0)
        start, n_passes = start + n_right + 1, n_passes + 1
    return tally.counts(), n_passes


def text(seed: int, chance: float, count: int = 4000) -> list[bool]:
    """Return whether each guess is right. The last is wrong, so that the text ends with a pass."""
    draws = random.Random(seed)
    return [draws.random() < chance for _ in range(count - 1)] + [False]


def cost_up_to(rows: int) -> PassCost:
    """Return costs with which passes of up to `rows` rows are free, and longer ones too slow."""
    return PassCost({1: 1.0} | {m: 1.0 if m <= rows else TOO_SLOW for m in PASS_ROWS})


@pytest.mark.parametrize("chance", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("n_guesses", [3, 7, 15])
@pytest.mark.parametrize("n_single", [0, 500])
def test_the_bound_is_the_speed_of_a_simulation(chance: float, n_guesses: int, n_single: int):
    """The lengths are those with which all passes begin where the longest drafts begin."""
    is_right = text(n_guesses, chance)
    counts, n_passes = simulate(is_right, DEPTH)
    bound = find_bound(counts, n_passes + n_single, cost_up_to(n_guesses + 1))
    _, expected_passes = simulate(is_right, n_guesses)
    n_tokens = len(is_right) + n_single
    # with rare right guesses, a shorter draft may be as good
    assert bound.n_guesses == n_guesses or (chance < 0.5 and bound.n_guesses < n_guesses)
    assert bound.tokens_per_pass == pytest.approx(n_tokens / (expected_passes + n_single))
    assert bound.speed == pytest.approx(bound.tokens_per_pass)


def test_the_best_length_is_that_of_the_fastest_simulation():
    cost = PassCost({1: 0.01, 4: 0.015, 8: 0.019, 12: 0.031, 16: 0.04})
    for chance in (0.2, 0.6, 0.8, 0.9, 0.98):
        is_right = text(1, chance)
        bound = find_bound(*simulate(is_right, DEPTH), cost)
        speeds = {0: 1.0} | {
            n_guesses: len(is_right)
            * 0.01
            / (simulate(is_right, n_guesses)[1] * cost(n_guesses + 1))
            for n_guesses in (3, 7, 11, 15)
        }
        assert bound.n_guesses == max(speeds, key=lambda length: speeds[length])
        assert bound.speed == pytest.approx(max(speeds.values()), rel=0.02)


def test_guesses_take_time_too():
    """Ten drafts of three guesses, all right, with passes of 2 s and guesses of 0.5 s each."""
    counts = DraftCounts("x", (10, 10, 10), (10, 10, 10), (10, 10, 10), 15.0)
    assert guess_seconds(counts) == pytest.approx(0.5)
    bound = find_bound(counts, 10, PassCost({1: 1.0, 4: 2.0}))
    assert (bound.n_guesses, bound.speed) == (3, pytest.approx(40 / (10 * 2.0 + 15.0)))
    assert bound.break_even == pytest.approx((40 - 15) / 10)
    slow = find_bound(counts, 10, PassCost({1: 1.0, 4: 2.6}))
    assert (slow.n_guesses, slow.speed, slow.tokens_per_pass) == (0, 1.0, 1.0)


def test_drafts_break_even_at_the_cost_that_is_named():
    counts, n_passes = simulate(text(4, 0.5), DEPTH)
    needed = find_bound(counts, n_passes, PassCost({1: 1.0, 4: 4.0})).break_even
    assert 1 < needed < 3
    for factor, length in ((0.98, SHORTEST_DRAFT), (1.02, 0)):
        cost = PassCost({1: 1.0, 4: factor * needed, 8: TOO_SLOW, 16: TOO_SLOW})
        assert find_bound(counts, n_passes, cost).n_guesses == length


def test_without_drafts_there_is_nothing_to_gain():
    bound = find_bound(DraftCounts("x"), 50, PassCost({1: 1.0, 4: 1.0}))
    assert (bound.speed, bound.n_guesses, bound.break_even) == (1.0, 0, 0.0)


def test_short_drafts_cost_short_passes():
    """Nine of ten drafts have one guess, which fits into a pass of four rows."""
    counts = DraftCounts("x", (10, *[1] * 14), (10, *[1] * 14), (10, *[1] * 14))
    cost = PassCost({1: 1.0, 4: 1.5, 8: 9.0, 12: 9.0, 16: 9.0})
    bound = find_bound(counts, 10, cost)
    # the long draft becomes four passes of three guesses
    assert bound.n_guesses == 3
    assert bound.speed == pytest.approx((9 * 2 + 16) / (9 * 1.5 + 4 * 1.5))
