"""A smaller model of the same vocabulary guesses token after token, in a separate context.

It keeps the text in its own cache, reads new tokens when it is asked next, and drops its wrong
guesses like the model. For a greedy answer it takes its likeliest token; otherwise it draws with
the answer's own settings and reports the distribution, so that as many guesses as possible are
kept. It must read each prompt, too, and does so when that takes little time compared with the
model, or when drafting has saved the time.
"""

from collections.abc import Iterable
from time import perf_counter
from typing import ClassVar, Protocol

import numpy as np

from llmcli.runtime.binding.batch import Rows
from llmcli.runtime.drafting.base import Draft, Odds, Tools
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.base import Words
from llmcli.runtime.sampling.chain import NumpyChain, Row, make_chain
from llmcli.runtime.sampling.rejection import draw

HOPED = 0.85  # acceptance expected at first
TRUST = 4.0  # guesses that the expectation counts as
DECAY = 0.98  # of the statistics, with each guess
# of the statistics, with each token without guesses, so that drafting is tried again
FADING = 0.995
CHUNK = 256  # tokens read in one pass, between two checks for cancellation


class Cells(Protocol):
    """What the drafter needs of its context."""

    n_ctx: int
    n_batch: int

    def decode(self, rows: Rows) -> Iterable[Row]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


class DraftModel:
    """The draft model's context, its tokens, its speed, and how often its guesses are right."""

    name: ClassVar[str] = "model"
    order: ClassVar[int] = 20
    draws: ClassVar[bool] = True

    def __init__(self, context: Cells, words: Words, one: float, reading: float) -> None:
        """`guess_seconds`: to guess a token. `read_seconds`: to read one token of many."""
        self.context, self.words, self.one, self.reading = context, words, one, reading
        self.held: list[int] = []
        self.owner: Ahead | None = None  # the answer whose text is in the context
        self.hits = self.tries = 0.0

    @classmethod
    def made(cls, tools: Tools) -> "DraftModel | None":
        """Create a drafter with the draft model of `resources`, or return None without one."""
        if tools.draft is None:
            return None
        context, curve = tools.draft
        return cls(context, tools.words, curve.one, curve(4) / 4)

    def start(self, request: Request, seed: int) -> "Ahead":
        """Start an answer; cells and statistics are kept."""
        return Ahead(self, request, seed)

    @property
    def chance(self) -> float:
        """Return how likely a guess is right if those before it are."""
        return (self.hits + HOPED * TRUST) / (self.tries + TRUST)

    def read(self, tokens: list[int], keep: int) -> Row:
        """Compute `tokens` after the first `keep` tokens of the context. Return the row of the last
        one.
        """
        if keep < len(self.held):
            if not self.context.trim(0, keep):
                self.context.trim(0, 0)
                tokens, keep = self.held[:keep] + tokens, 0
            del self.held[keep:]
        row: Row | None = None
        step = min(CHUNK, self.context.n_batch)
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            count, at = len(chunk), len(self.held)
            last = start + count == len(tokens)
            rows = Rows(chunk, range(at, at + count), [0] * count, [False] * (count - 1) + [last])
            row = next(iter(self.context.decode(rows)), None)
            self.held += chunk
        assert row is not None
        return row


class Ahead:
    """The guesses of the draft model for one answer."""

    def __init__(self, model: DraftModel, request: Request, seed: int) -> None:
        self.model = model
        self.chain = make_chain(request.sampling, seed, None, model.words)
        self.random = np.random.default_rng((seed, 1))  # not the random numbers of the answer
        self.sequence: Sequence | None = None
        self.agreed = 0  # tokens at the start of the text that are in the context

    def follow(self, sequence: Sequence) -> None:
        self.sequence = sequence
        if self.model.owner is not self:
            self.model.owner, self.agreed = self, 0
        cached, tokens, at = self.model.held, sequence.tokens, self.agreed
        most = min(len(cached), len(tokens))
        while at < most and cached[at] == tokens[at]:
            at += 1
        self.agreed = at
        self.model.hits *= FADING
        self.model.tries *= FADING

    def shortened(self) -> None:
        """Read the whole text again, if that pays."""
        self.agreed = 0

    def chances(self, count: int) -> list[float]:
        assert self.sequence
        return [self.model.chance] * min(
            count, self.model.context.n_ctx - len(self.sequence.tokens)
        )

    def cost(self, count: int) -> float:
        return count * self.model.one

    def reading(self) -> float:
        """Return the seconds to read the text without its last token, as far as it is not in the
        context.
        """
        assert self.sequence
        return max(0, len(self.sequence.tokens) - 1 - self.agreed) * self.model.reading

    def draft(self, count: int) -> Draft:
        """Read new tokens, then guess up to `count` tokens; the last guess is not computed."""
        assert self.sequence
        tokens, model, begun = self.sequence.tokens, self.model, perf_counter()
        row = self._catch_up(self.sequence)
        if row is None:
            return Draft([])
        reading_seconds = max(0.0, perf_counter() - begun - model.one)
        guesses: list[int] = []
        odds: list[Odds] = []
        for number in range(count):
            if number:
                begun = perf_counter()
                row = model.read(guesses[-1:], len(model.held))
                model.one += 0.1 * (min(perf_counter() - begun, 2 * model.one) - model.one)
            guesses.append(self._guess(row, [*tokens, *guesses], odds))
        return Draft(guesses, odds or None, reading_seconds)

    def _catch_up(self, sequence: Sequence) -> Row | None:
        """Read the text in chunks. Return the row of the last token, or None when the answer was
        cancelled.
        """
        tokens, begun = sequence.tokens, perf_counter()
        start = at = min(self.agreed, len(tokens) - 1)
        row: Row | None = None
        while at < len(tokens):
            if sequence.cancelled:
                return None
            row = self.model.read(tokens[at : at + CHUNK], at)
            self.agreed = at = min(at + CHUNK, len(tokens))
        if at - start > CHUNK // 4:
            self.model.reading = (perf_counter() - begun) / (at - start)
        return row

    def _guess(self, row: Row, tokens: list[int], odds: list[Odds]) -> int:
        if not isinstance(self.chain, NumpyChain):
            return self.chain.draw(row, tokens)
        odds.append(self.chain.probabilities(row, tokens))
        return draw(odds[-1], self.random)

    def judged(self, drafted: int, accepted: int) -> None:
        tried = min(drafted, accepted + 1)
        weight = DECAY**tried
        self.model.hits = self.model.hits * weight + accepted
        self.model.tries = self.model.tries * weight + tried

    def close(self) -> None:
        """Free the chain."""
        self.chain.close()


DRAFTERS = (DraftModel,)
