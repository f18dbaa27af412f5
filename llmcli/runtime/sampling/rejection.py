"""Speculative sampling: keeps a guess as often as possible without changing the distribution of the
answer.

A guess x drawn from q is kept with probability min(1, p(x) / q(x)); otherwise the token is drawn
from max(p − q, 0), normalized. Either way the token has distribution p (Leviathan et al. 2023, Chen
et al. 2023). The passes that verify drafts are in strategies/speculative.py.
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.sampling.chain import NumpyChain, RowLogits

Probabilities = NDArray[np.float32]


def keep_or_redraw(
    p: Probabilities, q: Probabilities, guess: int, random: np.random.Generator
) -> int:
    """Return a token that has the distribution `p`: the `guess` if it can be kept, otherwise
    another draw. `q`: the distribution that the guess was drawn from.

    Shapes: p, q `[n_vocab]`.
    """
    if random.random() * q[guess] < p[guess]:
        return guess
    remainder = np.maximum(p.astype(np.float64) - q, 0)
    return draw_index(remainder if remainder.any() else p, random)


def draw_index(weights: NDArray[np.floating], random: np.random.Generator) -> int:
    """Draw an index at random, with probabilities proportional to the weights.

    Shapes: weights `[n]`.
    """
    reached = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(reached, random.random() * reached[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


class RejectionChain:
    """A sampler chain that can keep a guess instead of drawing. `expected`: a guess for the next
    draw, and the distribution that the guess was drawn from; or None.
    """

    def __init__(self, chain: NumpyChain) -> None:
        self.chain = chain
        self.expected: tuple[int, Probabilities] | None = None

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the next token after `tokens`. `expected` is used for this draw only."""
        if self.expected is None:
            return self.chain.draw(row, tokens)
        (guess, q), self.expected = self.expected, None
        token = keep_or_redraw(self.chain.probabilities(row, tokens), q, guess, self.chain.random)
        self.chain.record_draw(token)
        return token

    def close(self) -> None:
        """Free the wrapped chain."""
        self.chain.close()
