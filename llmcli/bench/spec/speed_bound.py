"""How fast drafting can be: the speed that the acceptance of guesses and the cost T(m) of passes
allow.

The counts come from answers in which every draft was as long as possible (DraftCounts). From them
the number of passes follows for drafts of at most g guesses: a draft whose first r guesses were
right brought r + 1 tokens, for which shorter drafts take r // (g + 1) passes with right guesses
only, and one more. Passes without a draft bring one token. Nothing else takes time but the passes,
T(m) each, and the guesses. (Leviathan et al. 2023, equation 1, with measured cost and counts.)

The bound is the best g for all drafts. A drafter that knows where its guesses are right can be a
little faster than with one g.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from llmcli.runtime.drafting.gain.pass_cost import PASS_ROWS, PassCost
from llmcli.runtime.requests.draft_counts import DraftCounts

SHORTEST_DRAFT = PASS_ROWS[0] - 1  # guesses


@dataclass(frozen=True, slots=True)
class SpeedBound:
    """The largest possible speed, relative to plain decoding, and the number of guesses of a draft
    that gives it; 0 guesses when no draft saves time.

    - `tokens_per_pass`: with drafts of that length.
    - `break_even`: T(4) / T(1) below which drafts of three guesses save time; 0 without guesses.
    """

    speed: float
    n_guesses: int
    tokens_per_pass: float
    break_even: float


def find_bound(counts: DraftCounts, n_passes: int, cost: PassCost) -> SpeedBound:
    """Return the bound of a method. `counts` and `n_passes`: its drafts and all passes of the
    answers with the longest drafts.
    """
    best, chosen, per_pass = 1.0, 0, 1.0
    n_tokens, n_single = n_passes + counts.n_right, n_passes - counts.n_drafts
    for n_guesses in range(1, len(counts.guesses) + 1):
        passes = _count_passes(counts, n_guesses)
        seconds = sum(count * cost(length + 1) for length, count in passes.items())
        total = n_single + (seconds + _drafting_seconds(counts, passes)) / cost.single_seconds
        if n_tokens / total > best:
            best, chosen = n_tokens / total, n_guesses
            per_pass = n_tokens / (n_single + sum(passes.values()))
    return SpeedBound(best, chosen, per_pass, _break_even(counts, cost))


def guess_seconds(counts: DraftCounts) -> float:
    """Return the seconds for making one guess; 0 without guesses."""
    return counts.seconds / counts.n_guesses if counts.n_guesses else 0.0


def _count_passes(counts: DraftCounts, n_guesses: int) -> Counter[int]:
    """Return how many passes with each number of guesses there are, if a draft has at most
    `n_guesses`. The length of the draft that ends a run of right guesses is taken as if it did not
    depend on the run.
    """
    passes: Counter[int] = Counter()
    for length, (guesses, following) in enumerate(pairwise((*counts.guesses, 0)), 1):
        passes[min(length, n_guesses)] += guesses - following
    for length, (reached, following) in enumerate(pairwise((counts.n_drafts, *counts.right, 0))):
        passes[n_guesses] += (reached - following) * (length // (n_guesses + 1))
    return passes


def _drafting_seconds(counts: DraftCounts, passes: Counter[int]) -> float:
    """Return the seconds for making the guesses of `passes`."""
    return guess_seconds(counts) * sum(length * count for length, count in passes.items())


def _break_even(counts: DraftCounts, cost: PassCost) -> float:
    """Return the ratio T(4) / T(1) with which drafts of three guesses take as long as plain
    decoding; 0 without drafts, or if the guesses alone take longer.
    """
    passes = _count_passes(counts, SHORTEST_DRAFT)
    n_passes = sum(passes.values())
    if not n_passes:
        return 0.0
    n_tokens = counts.n_drafts + counts.n_right
    guessing = _drafting_seconds(counts, passes) / cost.single_seconds
    return max(0.0, (n_tokens - guessing) / n_passes)
