"""How the KV cache is used: tokens and cells of every sequence, and the tree of common prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from llmcli.runtime.kv_cache.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Held:
    """The use of one slot.

    `shared_cells`: cells of its longest prefix that another slot holds, too. `exclusive_cells`:
    cells that no earlier slot of the list holds, so that these add up to the cells in use.
    """

    slot: int
    running: bool
    tokens: int
    shared: int
    own: int


@dataclass(slots=True)
class Node:
    """A run of `tokens` tokens that the texts of `slots` have in common after the parent's run."""

    tokens: int
    slots: list[int]
    children: list["Node"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Census:
    """All slots that hold tokens, sorted so that common prefixes are adjacent, and their prefix
    tree.
    """

    held: tuple[Held, ...]
    prefixes: tuple[Node, ...]


def census(ledger: Ledger) -> Census:
    """Measure the use of the cache. Sorting by tokens makes slots with common prefixes adjacent, so
    only neighbors are compared.
    """
    slots = sorted(
        (slot for slot, tokens in enumerate(ledger.tokens) if tokens), key=ledger.tokens.__getitem__
    )
    lengths = [len(ledger.tokens[slot]) for slot in slots]
    # cells that each pair of neighbors shares
    shared = [
        sum(len(ledger.tokens[member]) for member in pair) - ledger.held(pair)
        for pair in pairwise(slots)
    ]
    running, usages = set(ledger.in_use), []
    for at, slot in enumerate(slots):
        with_previous, with_next = (
            shared[at - 1] if at else 0,
            shared[at] if at < len(shared) else 0,
        )
        usages.append(
            Held(
                slot,
                slot in running,
                lengths[at],
                max(with_previous, with_next),
                lengths[at] - with_previous,
            )
        )
    return Census(tuple(usages), _tree(ledger.tokens, slots))


def _tree(tokens: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[Node, ...]:
    """Build a radix tree of sorted texts."""
    root = Node(0, [])
    path: list[tuple[int, Node]] = [
        (0, root)
    ]  # the depth at which each node ends, from the root to the last text's leaf
    for at, slot in enumerate(slots):
        shared = _common(tokens[slots[at - 1]], tokens[slot]) if at else 0
        last: tuple[int, Node] | None = None
        while path[-1][0] > shared:
            last = path.pop()
        depth, node = path[-1]
        if depth < shared:  # split the last text's run where this text leaves it
            assert last is not None
            upper = Node(shared - depth, list(last[1].slots), [last[1]])
            last[1].tokens -= upper.tokens
            node.children[-1] = upper
            path.append((shared, upper))
        for _, above in path[1:]:
            above.slots.append(slot)
        if len(tokens[slot]) > shared:
            leaf = Node(len(tokens[slot]) - shared, [slot])
            path[-1][1].children.append(leaf)
            path.append((len(tokens[slot]), leaf))
    return tuple(root.children)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    short = min(len(first), len(second))
    if first[:short] == second[:short]:
        return short
    return next(
        at for at, (left, right) in enumerate(zip(first, second, strict=False)) if left != right
    )
