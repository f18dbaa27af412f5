"""Who holds what in the cache, in numbers: sequences, what they share, and the tree of texts that
begin alike.

Counted from the ledger's books between two steps; nothing here is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from llmcli.runtime.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence and its tokens. `shared`: of its cells, those of the first tokens that another
    holds as well; `own`: cells that no sequence before it in the list holds, so that these add up
    to the cells in use.
    """

    slot: int
    running: bool
    tokens: int
    shared: int
    own: int


@dataclass(slots=True)
class Node:
    """A run of `tokens` that the texts of `slots` have in common behind the run above."""

    tokens: int
    slots: list[int]
    children: list["Node"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Census:
    """All sequences that hold something, those that begin alike beside one another; and their tree."""

    held: tuple[Held, ...]
    prefixes: tuple[Node, ...]


def census(ledger: Ledger) -> Census:
    """Count; slots that begin alike are neighbours when sorted by their tokens, so only those are
    compared.
    """
    slots = sorted(
        (slot for slot, held in enumerate(ledger.tokens) if held), key=ledger.tokens.__getitem__
    )
    lengths = [len(ledger.tokens[slot]) for slot in slots]
    # Cells that neighbours share.
    same = [
        sum(len(ledger.tokens[one]) for one in pair) - ledger.held(pair) for pair in pairwise(slots)
    ]
    running, found = set(ledger.in_use), []
    for at, slot in enumerate(slots):
        before, behind = same[at - 1] if at else 0, same[at] if at < len(same) else 0
        found.append(
            Held(slot, slot in running, lengths[at], max(before, behind), lengths[at] - before)
        )
    return Census(tuple(found), _tree(ledger.tokens, slots))


def _tree(tokens: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[Node, ...]:
    """A radix tree of sorted texts, by their common beginnings."""
    root = Node(0, [])
    path: list[tuple[int, Node]] = [
        (0, root)
    ]  # how deep each node ends, from the root to the last text's
    for at, slot in enumerate(slots):
        same = _common(tokens[slots[at - 1]], tokens[slot]) if at else 0
        last: tuple[int, Node] | None = None
        while path[-1][0] > same:
            last = path.pop()
        depth, node = path[-1]
        if depth < same:  # the last text's run is parted where this one leaves it
            assert last is not None
            upper = Node(same - depth, list(last[1].slots), [last[1]])
            last[1].tokens -= upper.tokens
            node.children[-1] = upper
            path.append((same, upper))
        for _, above in path[1:]:
            above.slots.append(slot)
        if len(tokens[slot]) > same:
            leaf = Node(len(tokens[slot]) - same, [slot])
            path[-1][1].children.append(leaf)
            path.append((len(tokens[slot]), leaf))
    return tuple(root.children)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    short = min(len(one), len(other))
    if one[:short] == other[:short]:
        return short
    return next(
        at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs
    )
