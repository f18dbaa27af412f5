"""A radix tree over the tokens of all slots, which finds the longest cached prefix of a prompt.

Each node is a run of consecutive tokens. The path from the root to a node spells a prefix, and the
node lists the slots that start with this prefix. One walk from the root finds the longest prefix in
any slot, so the time does not depend on the number of slots. Each scope (a client that shares no
cells with others) has a separate tree.

Source: Zheng et al. 2024, RadixAttention.
"""

from collections.abc import Sequence

from llmcli.runtime.kv_cache.common_prefix import common_prefix


class RadixNode:
    """A node of the tree. `run`: its tokens, which follow those of the parent. `holders`: the slots
    whose tokens start with the path from the root to the end of the run. `children`: by the first
    token of their run.
    """

    __slots__ = ("children", "holders", "parent", "run")

    def __init__(self, parent: "RadixNode | None", run: list[int], holders: set[int]) -> None:
        self.parent, self.run, self.holders = parent, run, holders
        self.children: dict[int, RadixNode] = {}

    def split(self, at: int) -> "RadixNode":
        """Split the run before index `at` into two nodes. Return the new upper node; this node
        becomes its child and keeps the later tokens.
        """
        assert self.parent is not None and 0 < at < len(self.run), at
        upper = RadixNode(self.parent, self.run[:at], set(self.holders))
        self.parent.children[self.run[0]] = upper
        self.parent, self.run = upper, self.run[at:]
        upper.children[self.run[0]] = self
        return upper


class RadixTree:
    """The radix trees of all scopes. Tokens that are appended to a slot are found only after
    `extend` has added them, so that generating a token does not change the tree.
    """

    def __init__(self, slots: int) -> None:
        self._roots: dict[str, RadixNode] = {}
        self._ends: list[RadixNode | None] = [None] * slots
        self.lengths = [0] * slots  # tokens of each slot that are in the tree

    def extend(self, slot: int, tokens: list[int], scope: str) -> None:
        """Add tokens of a slot to the tree. `tokens`: all tokens of the slot, of which the first
        `lengths[slot]` are in the tree already. `scope`: the tree to use if none of the slot's
        tokens are in a tree.
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
            n_common = common_prefix(child.run, tokens[at : at + len(child.run)])
            end = child if n_common == len(child.run) else child.split(n_common)
            end.holders.add(slot)
            at += n_common
        self._ends[slot], self.lengths[slot] = end, count

    def _append(self, end: RadixNode, slot: int, tokens: list[int]) -> RadixNode:
        """Add `tokens`, which no child of `end` starts with, after `end`. Return the node that
        contains the last of them.
        """
        if end.parent is not None and end.holders == {slot} and not end.children:
            end.run += tokens
            return end
        child = end.children[tokens[0]] = RadixNode(end, tokens, {slot})
        return child

    def truncate(self, slot: int, keep: int) -> None:
        """Remove the tokens of a slot after the first `keep` from the tree."""
        node, length = self._ends[slot], self.lengths[slot]
        if keep >= length:
            return
        while node is not None and length > keep:
            start = length - len(node.run)
            if start < keep:
                upper = node.split(keep - start)
                self._remove_holder(node, slot)
                node, length = upper, keep
                break
            parent = node.parent
            self._remove_holder(node, slot)
            node, length = parent, start
        self.lengths[slot] = length
        self._ends[slot] = node if length else None

    def _remove_holder(self, node: RadixNode, slot: int) -> None:
        """Remove a slot from the holders of a node. A node without holders is deleted."""
        node.holders.discard(slot)
        if not node.holders and node.parent is not None:
            del node.parent.children[node.run[0]]

    def match(self, tokens: Sequence[int], scope: str) -> tuple[int, set[int]]:
        """Return the length of the longest prefix of `tokens` in the tree of a scope, and the slots
        that hold this prefix.
        """
        at, node = 0, self._roots.get(scope)
        while node is not None and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            n_common = common_prefix(child.run, list(tokens[at : at + len(child.run)]))
            at, node = at + n_common, child
            if n_common < len(child.run):
                break
        return at, node.holders if node is not None and at else set()

    def is_redundant(self, slot: int) -> bool:
        """Return whether another slot also holds all tokens that the tree contains for this slot.
        Return True if the tree contains no tokens of this slot.
        """
        end = self._ends[slot]
        return end is None or len(end.holders) > 1
