"""Common prefixes of token lists, and matches that continue after a gap."""

from bisect import bisect_left
from collections.abc import Sequence

ANCHOR_TOKENS = 16  # tokens that must agree for a match after a gap
# candidate positions after a gap that are compared; a repetitive text has many more
MAX_CANDIDATES = 32
BLOCK_TOKENS = 64  # tokens compared at once


def common_prefix(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    most = min(len(held), len(tokens))
    for at in range(0, most, BLOCK_TOKENS):
        left, right = list(held[at : at + BLOCK_TOKENS]), list(tokens[at : at + BLOCK_TOKENS])
        if left != right:
            pairs = enumerate(zip(left, right, strict=False))
            return next((at + offset for offset, (a, b) in pairs if a != b), most)
    return most


def find_gap(held: list[int], tokens: Sequence[int], at: int) -> int:
    """Return how many tokens of `held` to skip from index `at` so that it continues like `tokens`
    from `at`, for as many tokens as possible. Return 0 when no such position exists.
    """
    anchor = list(tokens[at : at + ANCHOR_TOKENS])
    if len(anchor) < ANCHOR_TOKENS:
        return 0
    first, positions = anchor[0], []
    for position in range(at + 1, len(held) - ANCHOR_TOKENS + 1):
        if held[position] == first and held[position : position + ANCHOR_TOKENS] == anchor:
            positions.append(position)
            if len(positions) == MAX_CANDIDATES:
                break
    return (
        max(positions, key=lambda position: common_prefix(held[position:], tokens[at:]), default=at)
        - at
    )


def match_after_gap(held: list[int], tokens: Sequence[int]) -> int:
    """Return how many of `tokens` the list `held` would start with if one gap in it were closed."""
    at = common_prefix(held, tokens)
    left_out = find_gap(held, tokens, at)
    return at + common_prefix(held[at + left_out :], tokens[at:]) if left_out else at


def count_shared(mine: list[int], theirs: list[int]) -> int:
    """Return the length of the common prefix of two lists, found by bisection. After the common
    prefix the lists must differ at every index.
    """
    return bisect_left(
        range(min(len(mine), len(theirs))), True, key=lambda at: mine[at] != theirs[at]
    )
