"""Trees of guessed tokens: their paths, branches and shortened forms."""

import numpy as np

from llmcli.runtime.requests.token_tree import TEXT, TokenTree


def test_paths_with_a_common_beginning_share_nodes() -> None:
    tree = TokenTree.merge([(5, 6, 7), (5, 6, 8), (5, 6), (9,), ()])
    assert tree.tokens == (5, 6, 7, 8, 9)
    assert tree.parents == (TEXT, 0, 1, 1, TEXT)
    assert tree.depths() == [0, 1, 2, 2, 0]
    assert tree.leaves() == [2, 3, 4]
    assert tree.branches() == [(0, 1), (0, 1), (0,), (1,), (2,)]
    assert not tree.is_chain


def test_a_chain_is_one_path() -> None:
    chain = TokenTree.chain([4, 4, 4])
    assert chain.is_chain and chain.main_path() == [0, 1, 2] and len(chain) == 3
    assert TokenTree.chain([]).is_chain and not TokenTree()
    assert TokenTree().main_path() == [] and TokenTree().branches() == []


def test_the_main_path_comes_first_also_where_its_leaf_does_not() -> None:
    tree = TokenTree((1, 2, 3, 4, 5), (TEXT, TEXT, 0, 1, 2))
    assert tree.leaves() == [4, 3]
    assert tree.main_path() == [0, 2, 4]
    assert tree.branches() == [(0,), (1,), (0,), (1,), (0,)]
    shorter = tree.shorten(4)
    assert shorter.main_path() == [0, 2] and shorter.leaves() == [2, 3]
    assert tree.shorten(-1) == TokenTree()


def test_any_tree_contains_its_paths_and_no_others() -> None:
    random = np.random.default_rng(2)
    for _ in range(200):
        paths = [
            tuple(int(token) for token in random.integers(0, 3, random.integers(1, 5)))
            for _ in range(random.integers(1, 6))
        ]
        tree = TokenTree.merge(paths)
        ends = {tuple(tree.tokens[node] for node in tree.path(leaf)) for leaf in tree.leaves()}
        assert ends == {
            path
            for path in paths
            if not any(other[: len(path)] == path and other != path for other in paths)
        }
        assert [tree.tokens[node] for node in tree.main_path()][: len(paths[0])] == list(paths[0])
        for path in paths:
            node = TEXT
            for token in path:
                found = tree.find_next(node, token)
                assert found is not None
                node = found
        for count in range(len(tree)):
            assert all(parent < count for parent in tree.shorten(count).parents)
        assert tree.find_next(TEXT, 3) is None
