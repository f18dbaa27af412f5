"""The shape of a tree has the nodes that are most likely right."""

from itertools import product

import numpy as np
import pytest

from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, chain_shape, choose_shape
from llmcli.runtime.requests.token_tree import TokenTree


def all_chances(chances: list[list[float]], extends_all: bool) -> list[float]:
    """Return the chances of all nodes of the largest tree, by going through all paths."""
    found = []
    for depth in range(len(chances)):
        for ranks in product(*(range(len(row)) for row in chances[: depth + 1])):
            if extends_all or not any(ranks[:-1]):
                found.append(float(np.prod([chances[at][rank] for at, rank in enumerate(ranks)])))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("extends_all", [False, True])
def test_the_nodes_are_those_with_the_largest_chances(extends_all: bool) -> None:
    random = np.random.default_rng(4)
    for _ in range(50):
        chances = [
            sorted(random.dirichlet([1.0] * (width + 1))[:width].tolist(), reverse=True)
            for width in random.integers(1, 4, random.integers(1, 5))
        ]
        expected = all_chances(chances, extends_all)
        for count in range(len(expected) + 1):
            shape = choose_shape(chances, ShapeLimits(count, 9, 99), extends_all)
            assert shape.chances == pytest.approx(expected[:count])
            assert all(parent < node for node, parent in enumerate(shape.parents))
            siblings = list(zip(shape.parents, shape.ranks, strict=True))
            assert len(set(siblings)) == len(siblings)
            assert shape.shorten(2).chances == shape.chances[:2]


def test_a_chain_has_the_products_of_its_chances() -> None:
    shape = chain_shape([0.8, 0.5, 0.5])
    assert shape.chances == pytest.approx((0.8, 0.4, 0.2))
    assert shape.parents == (-1, 0, 1) and shape.widths() == [1, 1, 1]
    assert shape.shorten(2).n_depths == 2 and shape.shorten(0).n_depths == 0
    assert shape == choose_shape([[0.8], [0.5], [0.5]], ShapeLimits(9, 9, 9), extends_all=False)


def test_widths_say_how_many_guesses_each_depth_needs() -> None:
    shape = choose_shape([[0.6, 0.3], [0.5, 0.4, 0.05]], ShapeLimits(5, 9, 9), extends_all=False)
    assert shape.chances == pytest.approx((0.6, 0.3, 0.3, 0.24, 0.03))
    assert shape.widths() == [2, 3]


def test_the_shape_keeps_its_limits() -> None:
    chances = [[0.6, 0.3, 0.2], [0.5, 0.4, 0.05], [0.5, 0.3]]
    largest = choose_shape(chances, ShapeLimits(99, 9, 99), extends_all=True)
    assert (len(largest), largest.n_depths) == (3 + 9 + 18, 3)
    for n_branches in range(1, 9):
        shape = choose_shape(chances, ShapeLimits(99, 2, n_branches), extends_all=True)
        tree = TokenTree(tuple(range(len(shape))), shape.parents)
        assert len(tree.leaves()) == min(n_branches, 9)
        assert shape.n_depths == 2
