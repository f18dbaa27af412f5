"""Chooses guesses from the logits of a drafter that computes some: for a greedy answer the likeliest
token, otherwise a token drawn with the sampling settings of the answer.
"""

import numpy as np

from llmcli.runtime.drafting.base import Probabilities
from llmcli.runtime.drafting.guesses.candidates import Candidates
from llmcli.runtime.drafting.top_tokens import top_tokens
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.sampling.chain import NumpyChain, RowLogits, make_chain
from llmcli.runtime.sampling.rejection import draw_index
from llmcli.runtime.vocabulary import Vocabulary

N_SEEDS = 1 << 32


class Guesser:
    """The sampler chain of one answer's guesses. Its random numbers are not those of the answer."""

    def __init__(self, sampling: Sampling, seed: int, vocabulary: Vocabulary) -> None:
        self.random = np.random.default_rng((seed, 1))
        chain_seed = int(self.random.integers(N_SEEDS))
        self.chain = make_chain(sampling, chain_seed, None, vocabulary)

    def choose_tokens(self, row: RowLogits, tokens: list[int], count: int) -> Candidates:
        """Return up to `count` different guesses for the token after `tokens`. There are fewer if
        the sampling settings allow no others.
        """
        if not isinstance(self.chain, NumpyChain):
            best = self.chain.draw(row, tokens)
            return Candidates(tuple(top_tokens(row.logits, count, best)) if count > 1 else (best,))
        weights = self.chain.probabilities(row, tokens)
        guesses: list[int] = []
        distributions: list[Probabilities] = []
        while True:
            guesses.append(draw_index(weights, self.random))
            distributions.append(weights)
            if len(guesses) == count:
                break
            rest = weights.copy()
            rest[guesses[-1]] = 0
            total = rest.sum(dtype=np.float64)
            if not total:
                break
            weights = (rest / total).astype(np.float32)
        return Candidates(tuple(guesses), tuple(distributions))

    def count_guesses(self, width: int, n_ranks: int) -> int:
        """Return how many guesses of a token to make, if a draft has `width` and may have `n_ranks`.
        Those that are not drawn cost little, and show how often they would be right.
        """
        return width if isinstance(self.chain, NumpyChain) else max(width, n_ranks)

    def close(self) -> None:
        """Free the sampler chain."""
        self.chain.close()
