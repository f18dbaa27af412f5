"""How far texts agree, as tokens: from the beginning, and again behind a gap."""

from bisect import bisect_left
from collections.abc import Sequence

ANCHOR = 16  # tokens that must agree for a text to be found again behind a gap
TRIED = 32  # places where they agree: a text that turns in circles has many
BLOCK = 64  # tokens compared at once


def common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    most = min(len(held), len(tokens))
    for at in range(0, most, BLOCK):
        one, other = list(held[at : at + BLOCK]), list(tokens[at : at + BLOCK])
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            return next((at + place for place, (mine, theirs) in pairs if mine != theirs), most)
    return most


def gap(held: list[int], tokens: Sequence[int], at: int) -> int:
    """How many tokens of `held` to leave out at `at`, so that it goes on longest as `tokens` do
    there; 0 for none.
    """
    anchor = list(tokens[at : at + ANCHOR])
    if len(anchor) < ANCHOR:
        return 0
    first, places = anchor[0], []
    for place in range(at + 1, len(held) - ANCHOR + 1):
        if held[place] == first and held[place : place + ANCHOR] == anchor:
            places.append(place)
            if len(places) == TRIED:
                break
    return max(places, key=lambda place: common(held[place:], tokens[at:]), default=at) - at


def reach(held: list[int], tokens: Sequence[int]) -> int:
    """How many of `tokens` a text would have in common with one gap closed."""
    at = common(held, tokens)
    left_out = gap(held, tokens, at)
    return at + common(held[at + left_out :], tokens[at:]) if left_out else at


def shared(mine: list[int], theirs: list[int]) -> int:
    """How many of two lists' numbers are the same, where all that are stand at the beginning:
    bisection finds it.
    """
    return bisect_left(
        range(min(len(mine), len(theirs))), True, key=lambda at: mine[at] != theirs[at]
    )
