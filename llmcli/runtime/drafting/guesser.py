"""Chooses guesses from the logits of a drafter that computes some: for a greedy answer the likeliest
token, otherwise a token drawn with the sampling settings of the answer.
"""

import numpy as np

from llmcli.runtime.drafting.base import Probabilities
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.sampling.chain import NumpyChain, RowLogits, make_chain
from llmcli.runtime.sampling.rejection import draw_index
from llmcli.runtime.vocabulary import Vocabulary


class Guesser:
    """The sampler chain of one answer's guesses. Its random numbers are not those of the answer."""

    def __init__(self, sampling: Sampling, seed: int, vocabulary: Vocabulary) -> None:
        self.chain = make_chain(sampling, seed, None, vocabulary)
        self.random = np.random.default_rng((seed, 1))

    def choose_token(
        self, row: RowLogits, tokens: list[int], distributions: list[Probabilities]
    ) -> int:
        """Return a guess for the token after `tokens`. If it is drawn, append its distribution to
        `distributions`.
        """
        if not isinstance(self.chain, NumpyChain):
            return self.chain.draw(row, tokens)
        distributions.append(self.chain.probabilities(row, tokens))
        return draw_index(distributions[-1], self.random)

    def close(self) -> None:
        """Free the sampler chain."""
        self.chain.close()
