"""A radix tree over the tokens of all slots, to find common prefixes.

A node is a run of tokens, with the slots whose tokens contain the path from the root to the end of
the run. One walk from the root finds a prefix, however many slots there are. Each scope (a client
that shares nothing with others) has a separate tree.

Source: Zheng et al. 2024, RadixAttention.
"""

from collections.abc import Sequence

from llmcli.runtime.kv_cache.common_prefix import common_prefix


class RadixNode:
    """A run of tokens that follows its parent's run."""

    __slots__ = ("children", "holders", "parent", "run")

    def __init__(self, parent: "RadixNode | None", run: list[int], holders: set[int]) -> None:
        self.parent, self.run, self.holders = parent, run, holders
        self.children: dict[int, RadixNode] = {}

    def split(self, at: int) -> "RadixNode":
        """Split the run at `at`. Return the new upper node; this node becomes its child."""
        assert self.parent is not None and 0 < at < len(self.run), at
        upper = RadixNode(self.parent, self.run[:at], set(self.holders))
        self.parent.children[self.run[0]] = upper
        self.parent, self.run = upper, self.run[at:]
        upper.children[self.run[0]] = self
        return upper


class RadixTree:
    """The radix tree. It is updated lazily: tokens appended to a slot are found only after `extend`
    has added them.
    """

    def __init__(self, slots: int) -> None:
        self._roots: dict[str, RadixNode] = {}
        self._ends: list[RadixNode | None] = [None] * slots
        self.lengths = [0] * slots  # tokens of each slot that are in the tree

    def extend(self, slot: int, tokens: list[int], scope: str) -> None:
        """Add the tokens of a slot that are not in the tree yet. `tokens`: all tokens of the slot;
        the first `lengths[slot]` of them are in the tree already. A slot without tokens in the tree
        is added to the tree of `scope`.
        """
        end = self._ends[slot]
        if end is None:
            end = self._roots.setdefault(scope, RadixNode(None, [], set()))
        at, count = self.lengths[slot], len(tokens)
        while at < count:
            child = end.children.get(tokens[at])
            if child is None:
                end = self._append(end, slot, tokens[at:])
                break
            same = common_prefix(child.run, tokens[at : at + len(child.run)])
            end = child if same == len(child.run) else child.split(same)
            end.holders.add(slot)
            at += same
        self._ends[slot], self.lengths[slot] = end, count

    def _append(self, end: RadixNode, slot: int, tokens: list[int]) -> RadixNode:
        if end.parent is not None and end.holders == {slot} and not end.children:
            end.run += tokens
            return end
        child = end.children[tokens[0]] = RadixNode(end, tokens, {slot})
        return child

    def truncate(self, slot: int, keep: int) -> None:
        """Remove a slot's tokens from the tree, except the first `keep`."""
        node, length = self._ends[slot], self.lengths[slot]
        if keep >= length:
            return
        while node is not None and length > keep:
            start = length - len(node.run)
            if start < keep:
                upper = node.split(keep - start)
                self._leave(node, slot)
                node, length = upper, keep
                break
            above = node.parent
            self._leave(node, slot)
            node, length = above, start
        self.lengths[slot] = length
        self._ends[slot] = node if length else None

    def _leave(self, node: RadixNode, slot: int) -> None:
        node.holders.discard(slot)
        if not node.holders and node.parent is not None:
            del node.parent.children[node.run[0]]

    def match(self, tokens: Sequence[int], scope: str) -> tuple[int, set[int]]:
        """Return the length of the longest prefix of `tokens` in the tree of this scope, and the
        slots that hold this prefix.
        """
        at, node = 0, self._roots.get(scope)
        while node is not None and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            same = common_prefix(child.run, list(tokens[at : at + len(child.run)]))
            at, node = at + same, child
            if same < len(child.run):
                break
        return at, node.holders if node is not None and at else set()

    def is_redundant(self, slot: int) -> bool:
        """Return whether another slot holds all tokens that the tree contains for this slot. It is
        True when there are none.
        """
        end = self._ends[slot]
        return end is None or len(end.holders) > 1
