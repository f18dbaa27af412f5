"""A tree of guessed tokens, which one forward pass checks. Each path from the text to a leaf is a
possible continuation of the text; paths with a common beginning share its tokens.

Source: SpecInfer (Miao et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

TEXT = -1  # the parent of the nodes that follow the text


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The nodes of a tree: their tokens, and the number of the node before each, or TEXT. A node
    comes after the node before it, and the nodes after one node have different tokens.

    The main path starts with the first node. Each further node of it is the first one that follows
    the node before.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "TokenTree":
        """Return a tree with a single path."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @classmethod
    def merge(cls, paths: Sequence[Sequence[int]]) -> "TokenTree":
        """Return a tree with these paths, the first of which is the main path."""
        tree = cls()
        for path in paths:
            tree = tree.add_path(path)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Return whether the tree has at most one path."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    def shorten(self, count: int) -> "TokenTree":
        """Return a tree with the first `count` nodes."""
        return TokenTree(self.tokens[: max(0, count)], self.parents[: max(0, count)])

    def find_next(self, node: int, token: int) -> int | None:
        """Return the node with a token after `node`, or None if there is none."""
        for number in range(node + 1, len(self.tokens)):
            if self.parents[number] == node and self.tokens[number] == token:
                return number
        return None

    def follow(self, path: list[int], tokens: Sequence[int]) -> bool:
        """Append the nodes that have `tokens` to a path. Return whether there is one for each; the
        path ends before the first token without one.
        """
        node = path[-1] if path else TEXT
        for token in tokens:
            found = self.find_next(node, token)
            if found is None:
                return False
            path.append(node := found)
        return True

    def add_path(self, tokens: Sequence[int]) -> "TokenTree":
        """Return a tree that also has a path with these tokens. Its new nodes are the last ones."""
        path: list[int] = []
        self.follow(path, tokens)
        rest = tokens[len(path) :]
        if not rest:
            return self
        node, count = path[-1] if path else TEXT, len(self)
        parents = (node, *range(count, count + len(rest) - 1))
        return TokenTree((*self.tokens, *rest), (*self.parents, *parents))

    @property
    def n_depths(self) -> int:
        """Return how many nodes the longest path has."""
        return 1 + max(self.depths(), default=-1)

    def depths(self) -> list[int]:
        """Return how many nodes come before each node on its path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == TEXT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Return the nodes from the text to `node`; none for TEXT."""
        nodes: list[int] = []
        while node != TEXT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def leaves(self) -> list[int]:
        """Return the last node of each path. The first one is that of the main path."""
        inner = set(self.parents)
        leaves = [node for node in range(len(self.tokens)) if node not in inner]
        main = TEXT
        for node, parent in enumerate(self.parents):
            if parent == main:
                main = node
        if main in leaves:
            leaves.remove(main)
            leaves.insert(0, main)
        return leaves

    def main_path(self) -> list[int]:
        """Return the nodes of the main path."""
        if self.is_chain:
            return list(range(len(self)))
        return self.path(self.leaves()[0])

    def branches(self) -> list[tuple[int, ...]]:
        """Return for each node the numbers of the paths that contain it. They are numbered as in
        `leaves`.
        """
        numbers: list[list[int]] = [[] for _ in self.tokens]
        for number, leaf in enumerate(self.leaves()):
            for node in self.path(leaf):
                numbers[node].append(number)
        return [tuple(row) for row in numbers]


NO_DRAFT = TokenTree()
