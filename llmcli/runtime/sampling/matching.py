"""Keep a guess as often as may be, and draw so that nobody can tell that there was one.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): a guess x that was drawn from q is
kept with probability min(1, p(x) / q(x)), else the token is drawn from max(p - q, 0), normed.
Either way its distribution is p.
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.sampling.chain import NumpyChain, Row

Odds = NDArray[np.float32]


def matched(p: Odds, q: Odds, guess: int, random: np.random.Generator) -> int:
    """A token distributed as `p` [n_vocab], the `guess` drawn from `q` [n_vocab] where it can be."""
    if random.random() * q[guess] < p[guess]:
        return guess
    rest = np.maximum(p.astype(np.float64) - q, 0)
    return draw(rest if rest.any() else p, random)


def draw(weights: NDArray[np.floating], random: np.random.Generator) -> int:
    """A place, as likely as its weight."""
    reached = np.cumsum(weights, dtype=np.float64)
    place = int(np.searchsorted(reached, random.random() * reached[-1], side="right"))
    return min(place, int(np.flatnonzero(weights)[-1]))


class Matching:
    """A chain whose next draw may keep a guess: `expected` is the guess and what it was drawn from."""

    def __init__(self, chain: NumpyChain) -> None:
        self.chain = chain
        self.expected: tuple[int, Odds] | None = None

    def draw(self, row: Row, tokens: list[int]) -> int:
        """The next token after `tokens`; what was expected counts for this draw only."""
        if self.expected is None:
            return self.chain.draw(row, tokens)
        (guess, q), self.expected = self.expected, None
        token = matched(self.chain.probabilities(row, tokens), q, guess, self.chain.random)
        self.chain.took(token)
        return token

    def close(self) -> None:
        """Free the chain."""
        self.chain.close()
