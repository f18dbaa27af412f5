"""Reports how the KV cache is used: the tokens and cells of every slot, and the tree of prefixes
that slots have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger


@dataclass(frozen=True, slots=True)
class SequenceUsage:
    """The use of the cache by one slot. `is_running`: whether an answer runs in it. `tokens`: the
    number of its tokens, each in one cell.

    - `shared_cells`: the length of the longest prefix whose cells another slot also uses.
    - `exclusive_cells`: cells that no slot listed earlier in `CacheUsage.sequences` uses. The sum
      over all slots is the number of cells in use.
    - `checkpoints`: the lengths at which the slot has a checkpoint, ascending.
    """

    slot: int
    is_running: bool
    tokens: int
    shared_cells: int
    exclusive_cells: int
    checkpoints: tuple[int, ...] = ()


@dataclass(slots=True)
class PrefixNode:
    """A node of the tree of common prefixes. It stands for `tokens` consecutive tokens, which
    follow those of the parent node in all of `slots`.
    """

    tokens: int
    slots: list[int]
    children: list["PrefixNode"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """The use of the cache by all slots that have tokens. `sequences` are sorted so that slots with
    a common prefix are adjacent. `prefixes` are the top nodes of the tree of common prefixes.
    """

    sequences: tuple[SequenceUsage, ...]
    prefixes: tuple[PrefixNode, ...]


def measure_cache_usage(ledger: Ledger) -> CacheUsage:
    """Return the present use of the cache. Slots are sorted by their tokens, which makes slots with
    a common prefix adjacent, so each slot is compared only with its neighbors.
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
                tuple(checkpoint.length for checkpoint in ledger.checkpoints.of_slot(slot)),
            )
        )
    return CacheUsage(tuple(usages), _build_prefix_tree(ledger.tokens, slots))


def _build_prefix_tree(
    tokens: Sequence[Sequence[int]], slots: Sequence[int]
) -> tuple[PrefixNode, ...]:
    """Return the top nodes of the tree of common prefixes. `slots` must be sorted by their
    tokens.
    """
    root = PrefixNode(0, [])
    # the nodes from the root to the leaf of the previous slot, each with the number of tokens from
    # the root to its end
    path: list[tuple[int, PrefixNode]] = [(0, root)]
    for at, slot in enumerate(slots):
        shared = common_prefix(tokens[slots[at - 1]], tokens[slot]) if at else 0
        last: tuple[int, PrefixNode] | None = None
        while path[-1][0] > shared:
            last = path.pop()
        depth, node = path[-1]
        # this slot diverges inside the run of the last node, which is split there
        if depth < shared:
            assert last is not None
            upper = PrefixNode(shared - depth, list(last[1].slots), [last[1]])
            last[1].tokens -= upper.tokens
            node.children[-1] = upper
            path.append((shared, upper))
        for _, ancestor in path[1:]:
            ancestor.slots.append(slot)
        if len(tokens[slot]) > shared:
            leaf = PrefixNode(len(tokens[slot]) - shared, [slot])
            path[-1][1].children.append(leaf)
            path.append((len(tokens[slot]), leaf))
    return tuple(root.children)
