"""Guesses by depth and rank, and the draft that a shape makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.runtime.drafting.base import Draft, Probabilities
from llmcli.runtime.drafting.gain.tree_shape import TreeShape
from llmcli.runtime.requests.token_tree import TEXT, TokenTree


@dataclass(frozen=True, slots=True)
class Candidates:
    """Different guesses of one token, the best first.

    `distributions`: for each the distribution `[n_vocab]` that it was drawn from, given those before
    it; empty if they were not drawn.
    """

    tokens: tuple[int, ...]
    distributions: tuple[Probabilities, ...] = ()


def fill_shape(
    shape: TreeShape, candidates: Sequence[Candidates], reading_seconds: float = 0.0
) -> Draft:
    """Return the draft whose nodes have the ranks of `shape`, with the guesses of their depths.
    Nodes without a guess are left out, and those after them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    distributions: list[Probabilities] = []
    depths = shape.depths()
    numbers: dict[int, int] = {TEXT: TEXT}  # of the nodes in the draft by those in the shape
    for node, (rank, parent, depth) in enumerate(
        zip(shape.ranks, shape.parents, depths, strict=True)
    ):
        if parent not in numbers or depth >= len(candidates):
            continue
        guesses = candidates[depth]
        if rank >= len(guesses.tokens):
            continue
        numbers[node] = len(tokens)
        tokens.append(guesses.tokens[rank])
        parents.append(numbers[parent])
        if guesses.distributions:
            distributions.append(guesses.distributions[rank])
    return Draft(
        TokenTree(tuple(tokens), tuple(parents)),
        tuple(distributions),
        tuple(guesses.tokens for guesses in candidates),
        reading_seconds,
    )
