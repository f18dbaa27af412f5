"""Functions that compare token lists: common prefixes, and matches that continue after a gap."""

from bisect import bisect_left
from collections.abc import Sequence

ANCHOR_TOKENS = 16  # tokens that must agree after a gap
# maximum ends of a gap that are compared; a repetitive text has many more
MAX_CANDIDATES = 32
BLOCK_TOKENS = 64  # tokens compared at once


def common_prefix(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of two token lists. Whole blocks are compared at once,
    which is faster than token by token.
    """
    length = min(len(cached), len(tokens))
    for start in range(0, length, BLOCK_TOKENS):
        first_block = list(cached[start : start + BLOCK_TOKENS])
        second_block = list(tokens[start : start + BLOCK_TOKENS])
        if first_block != second_block:
            pairs = enumerate(zip(first_block, second_block, strict=False))
            return next((start + offset for offset, (a, b) in pairs if a != b), length)
    return length


def find_gap(cached: list[int], tokens: Sequence[int], start: int) -> int:
    """Return how many tokens of `cached`, from index `start` on, must be left out so that the rest
    matches `tokens` from `start` on for as long as possible. Return 0 when no gap leads to a match
    of at least ANCHOR_TOKENS tokens.
    """
    anchor = list(tokens[start : start + ANCHOR_TOKENS])
    if len(anchor) < ANCHOR_TOKENS:
        return 0
    first, positions = anchor[0], []
    for position in range(start + 1, len(cached) - ANCHOR_TOKENS + 1):
        if cached[position] == first and cached[position : position + ANCHOR_TOKENS] == anchor:
            positions.append(position)
            if len(positions) == MAX_CANDIDATES:
                break
    return (
        max(
            positions,
            key=lambda position: common_prefix(cached[position:], tokens[start:]),
            default=start,
        )
        - start
    )


def match_after_gap(cached: list[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of two token lists after the best gap in `cached` is
    closed. Without such a gap it is the plain common prefix.
    """
    length = common_prefix(cached, tokens)
    gap = find_gap(cached, tokens, length)
    return length + common_prefix(cached[length + gap :], tokens[length:]) if gap else length


def count_shared(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two lists of cell numbers, found by bisection.
    Bisection works because two slots never share a cell after the common prefix.
    """
    return bisect_left(
        range(min(len(first), len(second))), True, key=lambda index: first[index] != second[index]
    )
