"""Plain decoding that reports the probabilities after the sampler chain instead of the model's own
(llama-server's `post_sampling_probs`).

A token is drawn from the distribution that is reported, so the chain runs in numpy.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.base import Logits
from llmcli.runtime.sampling.chain import NumpyChain, RowLogits, SamplerChain
from llmcli.runtime.sampling.rejection import draw_index
from llmcli.runtime.strategies.base import StrategyResources
from llmcli.runtime.strategies.plain import PlainStrategy
from llmcli.types import Event


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """A row of logits that are log-probabilities, so that their log-sum is 0."""

    logits: Logits

    def log_sum(self, near: float) -> float:
        """Return 0, the logarithm of the sum of all probabilities."""
        return 0.0


class ReportingChain:
    """A sampler chain that remembers the distribution of its last draw in `distribution`, which has
    the shape `[n_vocab]`. A greedy chain gives its token the probability 1.
    """

    def __init__(self, chain: SamplerChain) -> None:
        self.chain = chain
        self.distribution: Logits = np.zeros(0, np.float32)

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the next token after `tokens`."""
        if not isinstance(self.chain, NumpyChain):
            token = self.chain.draw(row, tokens)
            self.distribution = np.zeros(len(row.logits), np.float32)
            self.distribution[token] = 1
            return token
        self.distribution = self.chain.probabilities(row, tokens)
        token = draw_index(self.distribution, self.chain.random)
        self.chain.record_draw(token)
        return token

    def close(self) -> None:
        """Free the wrapped chain."""
        self.chain.close()


class PostSamplingStrategy(PlainStrategy):
    """Draws one token at a time. The log-probabilities of a token and of its alternatives are those
    after the sampler chain; an alternative that the chain has dropped is not listed.
    """

    name: ClassVar[str] = "post_sampling"

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None:
        super().__init__(request, seed, replace(resources, native=None))
        self.reporting_chain = ReportingChain(self.chain)
        self.chain, self.summing_chain = self.reporting_chain, None

    def _log_sum(self, row: RowLogits, may_sum: bool) -> float:
        return 0.0

    def _record(
        self,
        sequence: Sequence,
        row: RowLogits,
        token: int,
        log_sum: float | None,
        pass_seconds: float,
        sample_seconds: float,
    ) -> Event:
        if log_sum is not None:
            with np.errstate(divide="ignore"):
                row = LogProbabilities(np.log(self.reporting_chain.distribution))
        return super()._record(sequence, row, token, log_sum, pass_seconds, sample_seconds)


STRATEGIES = (PostSamplingStrategy,)
