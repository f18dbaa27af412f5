"""A radix tree over many token lists, which finds the longest of their prefixes that a prompt
starts with.

Each node is a run of consecutive tokens. The path from the root to a node spells a prefix, and the
node lists its holders: the numbers of the lists that start with this prefix. The lists are those of
slots (cells.py) or of states in host memory (offload_store.py). One walk from the root finds the
longest prefix in any list, so the time does not depend on their number. Each scope (a client that
shares no cells with others) has a separate tree.

Source: Zheng et al. 2024, RadixAttention.
"""

from collections.abc import Sequence

from llmcli.runtime.kv_cache.common_prefix import common_prefix


class RadixNode:
    """A node of the tree. `run`: its tokens, which follow those of the parent. `holders`: the
    numbers of the lists that start with the path from the root to the end of the run. `children`:
    by the first token of their run.
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
    """The radix trees of all scopes. Tokens that are appended to a list are found only after
    `extend` has added them, so that generating a token does not change the tree.
    """

    def __init__(self) -> None:
        self._roots: dict[str, RadixNode] = {}
        self._ends: dict[int, RadixNode] = {}
        self._lengths: dict[int, int] = {}

    def length(self, holder: int) -> int:
        """Return how many tokens of a list are in the tree."""
        return self._lengths.get(holder, 0)

    def extend(self, holder: int, tokens: list[int], scope: str) -> None:
        """Add tokens of a list to the tree. `tokens`: all tokens of the list, of which the first
        `length(holder)` are in the tree already. `scope`: the tree to use if none of them are in a
        tree.
        """
        end = self._ends.get(holder)
        if end is None:
            end = self._roots.setdefault(scope, RadixNode(None, [], set()))
        at, count = self.length(holder), len(tokens)
        while at < count:
            child = end.children.get(tokens[at])
            if child is None:
                end = self._append(end, holder, tokens[at:])
                break
            n_common = common_prefix(child.run, tokens[at : at + len(child.run)])
            end = child if n_common == len(child.run) else child.split(n_common)
            end.holders.add(holder)
            at += n_common
        if count:
            self._ends[holder], self._lengths[holder] = end, count

    def _append(self, end: RadixNode, holder: int, tokens: list[int]) -> RadixNode:
        """Add `tokens`, which no child of `end` starts with, after `end`. Return the node that
        contains the last of them.
        """
        if end.parent is not None and end.holders == {holder} and not end.children:
            end.run += tokens
            return end
        child = end.children[tokens[0]] = RadixNode(end, tokens, {holder})
        return child

    def truncate(self, holder: int, keep: int) -> None:
        """Remove the tokens of a list after the first `keep` from the tree."""
        node, length = self._ends.get(holder), self.length(holder)
        if keep >= length:
            return
        while node is not None and length > keep:
            start = length - len(node.run)
            if start < keep:
                upper = node.split(keep - start)
                self._remove_holder(node, holder)
                node, length = upper, keep
                break
            parent = node.parent
            self._remove_holder(node, holder)
            node, length = parent, start
        if length and node is not None:
            self._ends[holder], self._lengths[holder] = node, length
        else:
            del self._ends[holder], self._lengths[holder]

    def _remove_holder(self, node: RadixNode, holder: int) -> None:
        """Remove a list from the holders of a node. A node without holders is deleted."""
        node.holders.discard(holder)
        if not node.holders and node.parent is not None:
            del node.parent.children[node.run[0]]

    def match(self, tokens: Sequence[int], scope: str) -> tuple[int, set[int]]:
        """Return the length of the longest prefix of `tokens` in the tree of a scope, and the lists
        that start with this prefix.
        """
        return next(iter(self.prefixes(tokens, scope)), (0, set()))

    def prefixes(
        self, tokens: Sequence[int], scope: str, end: int | None = None
    ) -> list[tuple[int, set[int]]]:
        """Return the lengths of the prefixes of `tokens` after which lists of a scope end or
        diverge, and for each length the lists that start with this prefix. The longest is first.
        `end`: only so many tokens are compared; None: all.
        """
        found: list[tuple[int, set[int]]] = []
        end = len(tokens) if end is None else end
        at, node = 0, self._roots.get(scope)
        while node is not None and at < end:
            node = node.children.get(tokens[at])
            if node is None:
                break
            n_common = common_prefix(node.run, tokens[at : min(end, at + len(node.run))])
            at += n_common
            found.append((at, node.holders))
            if n_common < len(node.run):
                break
        return found[::-1]

    def is_redundant(self, holder: int) -> bool:
        """Return whether another list also starts with all tokens that the tree contains for this
        list. Return True if the tree contains no tokens of this list.
        """
        end = self._ends.get(holder)
        return end is None or len(end.holders) > 1
