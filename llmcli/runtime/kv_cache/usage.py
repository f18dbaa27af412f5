"""How the KV cache is used: tokens and cells of every sequence, and the tree of common prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger


@dataclass(frozen=True, slots=True)
class SequenceUsage:
    """The use of one slot.

    `shared_cells`: the longest prefix, in cells, that another slot also holds. `exclusive_cells`:
    cells that no earlier slot of `CacheUsage.sequences` holds; their sum over all slots is the
    number of cells in use.
    """

    slot: int
    is_running: bool
    tokens: int
    shared_cells: int
    exclusive_cells: int


@dataclass(slots=True)
class PrefixNode:
    """A run of `tokens` tokens that the slots in `slots` have in common after the run of the parent
    node.
    """

    tokens: int
    slots: list[int]
    children: list["PrefixNode"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """All slots that hold tokens, sorted so that common prefixes are adjacent, and their prefix
    tree.
    """

    sequences: tuple[SequenceUsage, ...]
    prefixes: tuple[PrefixNode, ...]


def measure_cache_usage(ledger: Ledger) -> CacheUsage:
    """Measure the use of the cache. Sorting by tokens makes slots with common prefixes adjacent, so
    only neighbors are compared.
    """
    slots = sorted(
        (slot for slot, tokens in enumerate(ledger.tokens) if tokens), key=ledger.tokens.__getitem__
    )
    lengths = [len(ledger.tokens[slot]) for slot in slots]
    # number of cells that each slot shares with the next one
    shared = [
        sum(len(ledger.tokens[member]) for member in pair) - ledger.count_cells(pair)
        for pair in pairwise(slots)
    ]
    running, usages = set(ledger.busy_slots), []
    for at, slot in enumerate(slots):
        with_previous, with_next = (
            shared[at - 1] if at else 0,
            shared[at] if at < len(shared) else 0,
        )
        usages.append(
            SequenceUsage(
                slot,
                slot in running,
                lengths[at],
                max(with_previous, with_next),
                lengths[at] - with_previous,
            )
        )
    return CacheUsage(tuple(usages), _tree(ledger.tokens, slots))


def _tree(tokens: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[PrefixNode, ...]:
    """Build a radix tree of sorted texts."""
    root = PrefixNode(0, [])
    path: list[tuple[int, PrefixNode]] = [
        (0, root)
        # the nodes from the root to the leaf of the last text, each with the tokens from the root to
        # its end
    ]
    for at, slot in enumerate(slots):
        shared = common_prefix(tokens[slots[at - 1]], tokens[slot]) if at else 0
        last: tuple[int, PrefixNode] | None = None
        while path[-1][0] > shared:
            last = path.pop()
        depth, node = path[-1]
        # this text branches off inside the last text's run, which is split there
        if depth < shared:
            assert last is not None
            upper = PrefixNode(shared - depth, list(last[1].slots), [last[1]])
            last[1].tokens -= upper.tokens
            node.children[-1] = upper
            path.append((shared, upper))
        for _, above in path[1:]:
            above.slots.append(slot)
        if len(tokens[slot]) > shared:
            leaf = PrefixNode(len(tokens[slot]) - shared, [slot])
            path[-1][1].children.append(leaf)
            path.append((len(tokens[slot]), leaf))
    return tuple(root.children)
