"""A smaller model of the same vocabulary guesses: token after token in a context of its own.

It keeps the text in its own cache, reads what is new when it is asked next, and forgets its wrong
guesses as the model does. For a greedy answer it takes its likeliest token; otherwise it draws by
the answer's own settings and tells the distribution, so that as many of its guesses as can be are
kept. It has to read each prompt, too, and does where the time for it is small beside the model's
own, or has been won.
"""

from collections.abc import Iterable
from time import perf_counter
from typing import ClassVar, Protocol

import numpy as np

from llmcli.runtime.binding.context import Rows
from llmcli.runtime.drafting.base import Draft, Odds, Tools
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.base import Words
from llmcli.runtime.sampling.chain import NumpyChain, Row, make_chain
from llmcli.runtime.sampling.matching import draw
from llmcli.runtime.sequence import Sequence

HOPED, TRUST = (
    0.85,
    4.0,
)  # the acceptance that is expected before anything is known, and how many guesses that counts
DECAY = 0.98  # of what is known, with each guess
# of what is known, with each token that nothing was guessed for: it is tried again now and then
FADING = 0.995
CHUNK = 256  # tokens read in one pass, between two looks at whether the answer was cancelled


class Cells(Protocol):
    """What the drafter asks of its context."""

    n_ctx: int
    n_batch: int

    def decode(self, rows: Rows) -> Iterable[Row]: ...

    def trim(self, sequence: int, keep: int) -> bool: ...


class DraftModel:
    """The context, which tokens it holds, how fast it is, and how often it is right."""

    name: ClassVar[str] = "model"
    order: ClassVar[int] = 20
    draws: ClassVar[bool] = True

    def __init__(self, context: Cells, words: Words, one: float, reading: float) -> None:
        """`one` and `reading`: seconds to guess a token, and to read one of many."""
        self.context, self.words, self.one, self.reading = context, words, one, reading
        self.held: list[int] = []
        self.owner: Ahead | None = None  # whose text that is
        self.hits = self.tries = 0.0

    @classmethod
    def made(cls, tools: Tools) -> "DraftModel | None":
        """With the draft model of `tools`, where there is one."""
        if tools.draft is None:
            return None
        context, curve = tools.draft
        return cls(context, tools.words, curve.one, curve(4) / 4)

    def start(self, request: Request, seed: int) -> "Ahead":
        """A new answer; cells and what was learned stay."""
        return Ahead(self, request, seed)

    @property
    def chance(self) -> float:
        """How likely a guess is right where those before it were."""
        return (self.hits + HOPED * TRUST) / (self.tries + TRUST)

    def read(self, tokens: list[int], keep: int) -> Row:
        """Compute `tokens` behind the first `keep` that are held; the last one's row."""
        if keep < len(self.held):
            if not self.context.trim(0, keep):
                self.context.trim(0, 0)
                tokens, keep = self.held[:keep] + tokens, 0
            del self.held[keep:]
        row: Row | None = None
        step = min(CHUNK, self.context.n_batch)
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            count, at = len(part), len(self.held)
            last = start + count == len(tokens)
            rows = Rows(part, range(at, at + count), [0] * count, [False] * (count - 1) + [last])
            row = next(iter(self.context.decode(rows)), None)
            self.held += part
        assert row is not None
        return row


class Ahead:
    """One answer's guesses."""

    def __init__(self, model: DraftModel, request: Request, seed: int) -> None:
        self.model = model
        self.chain = make_chain(request.sampling, seed, None, model.words)
        self.random = np.random.default_rng((seed, 1))  # not the answer's own numbers
        self.sequence: Sequence | None = None
        self.agreed = 0  # tokens at the beginning of the text that the context holds

    def follow(self, sequence: Sequence) -> None:
        self.sequence = sequence
        if self.model.owner is not self:
            self.model.owner, self.agreed = self, 0
        held, tokens, at = self.model.held, sequence.tokens, self.agreed
        most = min(len(held), len(tokens))
        while at < most and held[at] == tokens[at]:
            at += 1
        self.agreed = at
        self.model.hits *= FADING
        self.model.tries *= FADING

    def shortened(self) -> None:
        """All of it is read again, if that pays."""
        self.agreed = 0

    def chances(self, count: int) -> list[float]:
        assert self.sequence
        return [self.model.chance] * min(
            count, self.model.context.n_ctx - len(self.sequence.tokens)
        )

    def cost(self, count: int) -> float:
        return count * self.model.one

    def reading(self) -> float:
        """The text but its last token, as far as it is not held."""
        assert self.sequence
        return max(0, len(self.sequence.tokens) - 1 - self.agreed) * self.model.reading

    def draft(self, count: int) -> Draft:
        """Read what is new, then guess up to `count` tokens; the last one is not computed."""
        assert self.sequence
        tokens, model, begun = self.sequence.tokens, self.model, perf_counter()
        row = self._catch_up(self.sequence)
        if row is None:
            return Draft([])
        read = max(0.0, perf_counter() - begun - model.one)
        out: list[int] = []
        odds: list[Odds] = []
        for place in range(count):
            if place:
                begun = perf_counter()
                row = model.read(out[-1:], len(model.held))
                model.one += 0.1 * (min(perf_counter() - begun, 2 * model.one) - model.one)
            out.append(self._guess(row, [*tokens, *out], odds))
        return Draft(out, odds or None, read)

    def _catch_up(self, sequence: Sequence) -> Row | None:
        """The last token's row, everything before it read, a chunk at a time; None where the answer
        was cancelled.
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
