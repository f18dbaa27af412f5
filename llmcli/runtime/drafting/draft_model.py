"""Drafts with a smaller model of the same vocabulary, which guesses token after token in a separate
context.

The draft model keeps the text in its own cache. When it is asked to guess, it first reads the
tokens that are new and drops its wrong guesses from the cache. For a greedy answer it guesses its
likeliest token. Otherwise it draws with the sampling settings of the answer and reports the
distribution, so that as many guesses as possible are kept. It must read each prompt, too, which it
does only when that takes little time compared with the model, or when drafting has saved the time.
"""

from collections.abc import Iterable
from time import perf_counter
from typing import ClassVar, Protocol

import numpy as np

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.drafting.base import Draft, DrafterResources, Probabilities
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import NumpyChain, RowLogits, make_chain
from llmcli.runtime.sampling.rejection import draw_index
from llmcli.runtime.vocabulary import Vocabulary

INITIAL_CHANCE = 0.85  # chance of a guess before any were counted
INITIAL_WEIGHT = 4.0  # number of guesses that INITIAL_CHANCE counts as
GUESS_DECAY = 0.98  # weight of earlier guesses in the statistics after a guess
# the same after a token without guesses; it makes the model try drafting again
TOKEN_DECAY = 0.995
CHUNK_TOKENS = 256  # tokens read in one pass; cancellation is checked between passes


class DraftContext(Protocol):
    """What the drafter needs of its context."""

    n_ctx: int
    n_batch: int

    def decode(self, rows: BatchRows) -> Iterable[RowLogits]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


class DraftModel:
    """The context of the draft model, the tokens in it, its speed, and how often its guesses are
    right.
    """

    name: ClassVar[str] = "model"
    order: ClassVar[int] = 20
    draws: ClassVar[bool] = True

    def __init__(
        self,
        context: DraftContext,
        vocabulary: Vocabulary,
        guess_seconds: float,
        read_seconds: float,
    ) -> None:
        """`guess_seconds`: time to guess one token. `read_seconds`: time per token when many are
        read at once.
        """
        self.context, self.vocabulary, self.guess_seconds, self.read_seconds = (
            context,
            vocabulary,
            guess_seconds,
            read_seconds,
        )
        self.tokens: list[int] = []
        self.owner: ModelDrafts | None = None  # the answer whose text is in the context
        self.hits = self.tries = 0.0

    @classmethod
    def create(cls, resources: DrafterResources) -> "DraftModel | None":
        """Create a drafter with the draft model of `resources`. Return None when there is no draft
        model.
        """
        if resources.draft_model is None:
            return None
        context, curve = resources.draft_model
        return cls(context, resources.vocabulary, curve.single_seconds, curve(4) / 4)

    def start(self, request: Request, seed: int) -> "ModelDrafts":
        """Return the drafts for a new answer. Cells and statistics of earlier answers stay."""
        return ModelDrafts(self, request, seed)

    @property
    def chance(self) -> float:
        """Return how likely a guess is right if all guesses before it are right."""
        return (self.hits + INITIAL_CHANCE * INITIAL_WEIGHT) / (self.tries + INITIAL_WEIGHT)

    def read(self, tokens: list[int], keep: int) -> RowLogits:
        """Keep the first `keep` tokens of the context and compute `tokens` after them. Return the
        row of the last token.
        """
        if keep < len(self.tokens):
            if not self.context.trim(0, keep):
                self.context.trim(0, 0)
                tokens, keep = self.tokens[:keep] + tokens, 0
            del self.tokens[keep:]
        row: RowLogits | None = None
        step = min(CHUNK_TOKENS, self.context.n_batch)
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            count, at = len(chunk), len(self.tokens)
            last = start + count == len(tokens)
            rows = BatchRows(
                chunk, range(at, at + count), [0] * count, [False] * (count - 1) + [last]
            )
            row = next(iter(self.context.decode(rows)), None)
            self.tokens += chunk
        assert row is not None
        return row


class ModelDrafts:
    """The guesses of the draft model for one answer."""

    def __init__(self, model: DraftModel, request: Request, seed: int) -> None:
        self.model = model
        self.chain = make_chain(request.sampling, seed, None, model.vocabulary)
        # separate from the random numbers of the answer
        self.random = np.random.default_rng((seed, 1))
        self.sequence: Sequence | None = None
        self.n_matching = 0  # number of tokens at the start of the text that are in the context

    def follow(self, sequence: Sequence) -> None:
        self.sequence = sequence
        if self.model.owner is not self:
            self.model.owner, self.n_matching = self, 0
        cached, tokens, at = self.model.tokens, sequence.tokens, self.n_matching
        most = min(len(cached), len(tokens))
        while at < most and cached[at] == tokens[at]:
            at += 1
        self.n_matching = at
        self.model.hits *= TOKEN_DECAY
        self.model.tries *= TOKEN_DECAY

    def on_context_shift(self) -> None:
        """Mark the whole text as unread; it is read again when that pays."""
        self.n_matching = 0

    def chances(self, count: int) -> list[float]:
        assert self.sequence
        return [self.model.chance] * min(
            count, self.model.context.n_ctx - len(self.sequence.tokens)
        )

    def cost_seconds(self, count: int) -> float:
        return count * self.model.guess_seconds

    def reading_seconds(self) -> float:
        """Return the seconds to read those tokens of the text that are not in the context. The last
        token is not counted.
        """
        assert self.sequence
        return max(0, len(self.sequence.tokens) - 1 - self.n_matching) * self.model.read_seconds

    def draft(self, count: int) -> Draft:
        """Read the new tokens of the text, then guess up to `count` tokens. The last guess is not
        computed.
        """
        assert self.sequence
        tokens, model, begun = self.sequence.tokens, self.model, perf_counter()
        row = self._catch_up(self.sequence)
        if row is None:
            return Draft([])
        reading_seconds = max(0.0, perf_counter() - begun - model.guess_seconds)
        guesses: list[int] = []
        odds: list[Probabilities] = []
        for number in range(count):
            if number:
                begun = perf_counter()
                row = model.read(guesses[-1:], len(model.tokens))
                model.guess_seconds += 0.1 * (
                    min(perf_counter() - begun, 2 * model.guess_seconds) - model.guess_seconds
                )
            guesses.append(self._guess(row, [*tokens, *guesses], odds))
        return Draft(guesses, odds or None, reading_seconds)

    def _catch_up(self, sequence: Sequence) -> RowLogits | None:
        """Read the text that is not in the context, in chunks. Return the row of the last token, or
        None when the answer was cancelled.
        """
        tokens, begun = sequence.tokens, perf_counter()
        start = at = min(self.n_matching, len(tokens) - 1)
        row: RowLogits | None = None
        while at < len(tokens):
            if sequence.is_cancelled:
                return None
            row = self.model.read(tokens[at : at + CHUNK_TOKENS], at)
            self.n_matching = at = min(at + CHUNK_TOKENS, len(tokens))
        if at - start > CHUNK_TOKENS // 4:
            self.model.read_seconds = (perf_counter() - begun) / (at - start)
        return row

    def _guess(self, row: RowLogits, tokens: list[int], odds: list[Probabilities]) -> int:
        if not isinstance(self.chain, NumpyChain):
            return self.chain.draw(row, tokens)
        odds.append(self.chain.probabilities(row, tokens))
        return draw_index(odds[-1], self.random)

    def record_result(self, drafted: int, accepted: int) -> None:
        tried = min(drafted, accepted + 1)
        weight = GUESS_DECAY**tried
        self.model.hits = self.model.hits * weight + accepted
        self.model.tries = self.model.tries * weight + tried

    def close(self) -> None:
        """Free the sampler chain."""
        self.chain.close()


DRAFTERS = (DraftModel,)
