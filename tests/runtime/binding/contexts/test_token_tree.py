"""Passes over trees of tokens: each node has the logits that it has after its own path, and a kept
branch continues the text.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding.contexts.context import Aborted, Context, NoSlot
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.token_tree import TokenTree

TEXT = [1, 403, 407, 261, 378]
#   0-1-2
#   |  \3
#   4-5
TREE = TokenTree.merge([(310, 278, 411), (310, 278, 300), (264, 333)])

# Logits of up to 18, summed in float32 in another order. Other tokens change them by more than 0.1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(stories_gguf: Path) -> Iterator[Model]:
    with open_model(stories_gguf) as opened:
        yield opened


def options(n_ctx: int = 256, n_branches: int = 3) -> ContextOptions:
    # Flash attention and a float16 cache round queries to float16. Last bits, which depend on the
    # number of rows and the order of the cells, then grow to 5e-4 of a logit.
    return ContextOptions(
        n_ctx,
        64,
        64,
        type_k="f32",
        type_v="f32",
        flash_attn="off",
        n_outputs=16,
        n_branches=n_branches,
    )


def add(context: Context, tokens: list[int], start: int) -> list[np.ndarray]:
    """Compute tokens one by one, and return the logits after each."""
    return [
        context.decode(BatchRows([token], [start + at], [0], [True]))[0].logits.copy()
        for at, token in enumerate(tokens)
    ]


def tree_rows(tree: TokenTree, pending: list[int], start: int) -> BatchRows:
    """Return the rows of a tree after the tokens `pending`, the first of which is at `start`."""
    branches = tree.branches()
    everywhere = tuple(range(len(tree.leaves())))
    end = start + len(pending)
    return BatchRows(
        [*pending, *tree.tokens],
        [*range(start, end), *(end + depth for depth in tree.depths())],
        [0] * (len(pending) + len(tree)),
        [True] * (len(pending) + len(tree)),
        [*[everywhere] * len(pending), *branches],
    )


def expected(model: Model, text: list[int]) -> np.ndarray:
    """Return the logits after a text, computed alone."""
    with open_context(model, options(n_branches=0)) as context:
        return add(context, text, 0)[-1]


@pytest.mark.parametrize("n_pending", [1, 3])
def test_each_node_has_the_logits_of_its_own_path(model: Model, n_pending: int) -> None:
    with open_context(model, options()) as context:
        computed, pending = TEXT[:-n_pending], TEXT[-n_pending:]
        add(context, computed, 0)
        rows = context.decode(tree_rows(TREE, pending, len(computed)))
        found = [row.logits.copy() for row in rows]
    np.testing.assert_allclose(found[n_pending - 1], expected(model, TEXT), atol=TOLERANCE)
    for node in range(len(TREE)):
        path = [TREE.tokens[number] for number in TREE.path(node)]
        np.testing.assert_allclose(
            found[n_pending + node], expected(model, [*TEXT, *path]), atol=TOLERANCE
        )


@pytest.mark.parametrize("leaf", [2, 3, 5])
def test_a_kept_branch_continues_the_text(model: Model, leaf: int) -> None:
    path = TREE.path(leaf)
    branch = TREE.leaves().index(leaf)
    with open_context(model, options()) as context:
        add(context, TEXT[:-1], 0)
        context.decode(tree_rows(TREE, TEXT[-1:], len(TEXT) - 1))
        if branch:
            assert context.trim(0, len(TEXT))
            context.keep_branch(0, branch, len(TEXT), len(TEXT) + len(path))
        context.drop_branches()
        length = len(TEXT) + len(path)
        assert context.last_position(0) == length - 1
        text = [*TEXT, *(TREE.tokens[node] for node in path)]
        found = add(context, [290], length)[0]
        np.testing.assert_allclose(found, expected(model, [*text, 290]), atol=TOLERANCE)
        # The same cells are free again.
        add(context, [280] * (context.n_ctx - length - 1), length + 1)
        with pytest.raises(NoSlot):
            add(context, [280], context.n_ctx)


def test_a_pass_that_fails_leaves_no_branches(model: Model) -> None:
    with open_context(model, options()) as context:
        add(context, TEXT[:-1], 0)
        context.interrupt()
        with pytest.raises(Aborted):
            context.decode(tree_rows(TREE, TEXT[-1:], len(TEXT) - 1))
        assert context.trim(0, len(TEXT) - 1)
        found = add(context, TEXT[-1:], len(TEXT) - 1)[0]
        np.testing.assert_allclose(found, expected(model, TEXT), atol=TOLERANCE)
        n_free = context.n_ctx - len(TEXT)
        add(context, [280] * (n_free - len(TREE) + 1), len(TEXT))
        length = context.last_position(0) + 1
        with pytest.raises(NoSlot):  # one cell is missing
            context.decode(tree_rows(TREE, [290], length))
        assert context.last_position(0) == length - 1
        add(context, [280] * (len(TREE) - 1), length)


def test_more_branches_than_the_context_has_are_refused(model: Model) -> None:
    with open_context(model, options(n_branches=1)) as context:
        add(context, TEXT[:-1], 0)
        with pytest.raises(AssertionError, match="too many branches"):
            context.decode(tree_rows(TREE, TEXT[-1:], len(TEXT) - 1))
