"""Rejection sampling for speculative decoding: accepts a draft model's guess as often as possible
without changing the distribution of the answer.

p is the distribution of the model, and q that of the draft model. A guess x drawn from q is
accepted with the probability min(1, p(x) / q(x)). Otherwise the token is drawn from the normalized
max(p − q, 0). Then the token has the distribution p (Leviathan et al. 2023, Chen et al. 2023). The
forward passes that verify guesses are in strategies/speculative.py.
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.sampling.chain import NumpyChain, RowLogits

Probabilities = NDArray[np.float32]


def keep_or_redraw(
    p: Probabilities, q: Probabilities, guess: int, random: np.random.Generator
) -> int:
    """Return a token that has the distribution `p`: the accepted `guess`, or a token drawn in its
    place. `q`: the distribution that the guess was drawn from.

    Shapes: p, q `[n_vocab]`.
    """
    if random.random() * q[guess] < p[guess]:
        return guess
    remainder = np.maximum(p.astype(np.float64) - q, 0)
    return draw_index(remainder if remainder.any() else p, random)


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

    `expected`: the guess for the next draw, and the distribution `[n_vocab]` that the guess was
    drawn from. With None, the wrapped chain draws the token.
    """

    def __init__(self, chain: NumpyChain) -> None:
        self.chain = chain
        self.expected: tuple[int, Probabilities] | None = None

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the next token after `tokens`. The draw uses `expected` and resets it to None."""
        if self.expected is None:
            return self.chain.draw(row, tokens)
        (guess, q), self.expected = self.expected, None
        token = keep_or_redraw(self.chain.probabilities(row, tokens), q, guess, self.chain.random)
        self.chain.record_draw(token)
        return token

    def close(self) -> None:
        """Free the wrapped chain."""
        self.chain.close()
