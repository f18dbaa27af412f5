"""Rejection sampling for speculative decoding: accepts guesses as often as possible without changing
the distribution of the answer.

p is the distribution of the model, and q that of a drafter. A guess x drawn from q is accepted with
the probability min(1, p(x) / q(x)). Otherwise p is replaced by the normalized max(p − q, 0): the
next guess for the same token is accepted by it, or the token is drawn from it if there is no further
guess. Then the token has the distribution p (Leviathan et al. 2023, Chen et al. 2023; several
guesses: multi-step speculative sampling of SpecInfer, Miao et al. 2024). The forward passes that
verify guesses are in strategies/speculative.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.sampling.chain import NumpyChain, RowLogits

Probabilities = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A guess of a token. `q`: the distribution `[n_vocab]` that it was drawn from, given the
    proposals for the same token before it; None for a guess that was not drawn.
    """

    token: int
    q: Probabilities | None


def choose_token(
    p: Probabilities, proposals: Sequence[Proposal], random: np.random.Generator
) -> int:
    """Return a token that has the distribution `p`: the first accepted proposal, or a token drawn
    in their place.

    Shapes: p `[n_vocab]`.
    """
    rest: NDArray[np.floating] = p
    for proposal in proposals:
        token, q = proposal.token, proposal.q
        if random.random() * (1.0 if q is None else q[token]) < rest[token]:
            return token
        remainder = rest.astype(np.float64)
        if q is None:
            remainder[token] = 0
        else:
            remainder = np.maximum(remainder - q, 0)
        total = remainder.sum()
        if total:  # otherwise p and q differ only by rounding
            rest = remainder / total
    return draw_index(rest, random)


def draw_index(weights: NDArray[np.floating], random: np.random.Generator) -> int:
    """Return an index drawn at random, with probabilities proportional to the weights. The weights
    must not be negative, nor all 0.

    Shapes: weights `[n]`.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


class RejectionChain:
    """A sampler chain that accepts a guess as the next token if rejection sampling allows it.

    `proposals`: the guesses for the next draw. Without any, the wrapped chain draws the token.
    """

    def __init__(self, chain: NumpyChain) -> None:
        self.chain = chain
        self.proposals: Sequence[Proposal] = ()

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the next token after `tokens`. The draw uses up the proposals."""
        if not self.proposals:
            return self.chain.draw(row, tokens)
        proposals, self.proposals = self.proposals, ()
        probabilities = self.chain.probabilities(row, tokens)
        token = choose_token(probabilities, proposals, self.chain.random)
        self.chain.record_draw(token)
        return token

    def close(self) -> None:
        """Free the wrapped chain."""
        self.chain.close()
