"""Chooses the shape of a draft: which guesses, at which depth and rank, are worth a row of the pass
that checks them.

A drafter ranks its guesses for a token: rank 0 is the best. The shape is a tree of ranks, without
tokens, because it must not depend on the guesses that are drawn (sampling/rejection.py). The node
with the largest chance to be right is added first. The chance of a node is that of all guesses on
its path, so a node is never added before the one that it follows.

Source: Medusa (Cai et al. 2024, section 2.3.3), which builds its tree in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from llmcli.runtime.requests.token_tree import TEXT, TokenTree

# For each depth the chances of the guesses of rank 0, 1, 2 and so on, if all guesses before are right
RankChances = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """The largest draft that is possible: its nodes, the nodes of a path, and the paths."""

    n_nodes: int
    n_depths: int
    n_branches: int = 1

    @property
    def chain_length(self) -> int:
        """Return the number of nodes of the longest possible single path."""
        return max(0, min(self.n_nodes, self.n_depths))


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The nodes of a draft, in the order in which they are worth a row.

    - `ranks`: the rank of each guess. `parents`: as in TokenTree.
    - `chances`: the chance that a node is right, with all nodes before it.
    - `least`: a draft with fewer nodes is of no use.
    """

    ranks: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    least: int = 1

    def __len__(self) -> int:
        return len(self.ranks)

    def shorten(self, count: int) -> "TreeShape":
        """Return the shape with the first `count` nodes."""
        return TreeShape(self.ranks[:count], self.parents[:count], self.chances[:count], self.least)

    def depths(self) -> list[int]:
        """Return how many nodes come before each node on its path."""
        return TokenTree(self.ranks, self.parents).depths()

    @property
    def n_depths(self) -> int:
        """Return how many guesses the longest path has."""
        return TokenTree(self.ranks, self.parents).n_depths

    def widths(self) -> list[int]:
        """Return for each depth how many guesses of a token it needs: one more than its largest rank."""
        widths: list[int] = []
        for depth, rank in zip(self.depths(), self.ranks, strict=True):
            widths += [0] * (depth + 1 - len(widths))
            widths[depth] = max(widths[depth], rank + 1)
        return widths


def chain_shape(chances: Sequence[float]) -> TreeShape:
    """Return the shape of a single path of guesses, whose chances are those of a guess if all
    guesses before are right.
    """
    products: list[float] = []
    for chance in chances:
        products.append(chance * (products[-1] if products else 1.0))
    count = len(products)
    return TreeShape((0,) * count, tuple(range(-1, count - 1)), tuple(products))


def choose_shape(chances: RankChances, limits: ShapeLimits, extends_all: bool) -> TreeShape:
    """Return the shape of the nodes with the largest chances.

    `extends_all`: whether guesses follow every node. Otherwise they follow only nodes of the main
    path, whose ranks are all 0, because the drafter has no guesses after the others.
    """
    if limits.n_branches == 1:
        return chain_shape([ranks[0] for ranks in chances[: limits.chain_length] if ranks])
    ranks: list[int] = []
    parents: list[int] = []
    found: list[float] = []
    # the negative chance, a number that makes entries different, depth, rank, the node before
    queue: list[tuple[float, int, int, int, int]] = []
    n_entries = 0

    def offer(depth: int, rank: int, parent: int) -> None:
        nonlocal n_entries
        if depth < min(len(chances), limits.n_depths) and rank < len(chances[depth]):
            before = 1.0 if parent == TEXT else found[parent]
            heappush(queue, (-before * chances[depth][rank], n_entries, depth, rank, parent))
            n_entries += 1

    offer(0, 0, TEXT)
    is_main: list[bool] = []
    n_branches = 1
    while queue and len(ranks) < limits.n_nodes:
        negative, _, depth, rank, parent = heappop(queue)
        if rank:  # the node before has another one after it already
            if n_branches == limits.n_branches:
                continue
            n_branches += 1
        node = len(ranks)
        ranks.append(rank)
        parents.append(parent)
        found.append(-negative)
        is_main.append(rank == 0 and (parent == TEXT or is_main[parent]))
        offer(depth, rank + 1, parent)
        if extends_all or is_main[node]:
            offer(depth + 1, 0, node)
    return TreeShape(tuple(ranks), tuple(parents), tuple(found))
