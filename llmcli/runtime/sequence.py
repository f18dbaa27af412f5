"""One request on its way: the only thing besides the ledger that changes while tokens are made."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.overflow import Shorter
from llmcli.runtime.pool import Away
from llmcli.runtime.ranked import Ranked, Scored, top
from llmcli.runtime.repetition import EVERY
from llmcli.runtime.request import NEW, NOTHING, Answer, Begun, Hypothesis, Left, Request
from llmcli.runtime.sampling.chain import Row
from llmcli.types import Finish, TokenTime

if TYPE_CHECKING:  # strategies work on sequences
    from llmcli.runtime.strategies.base import Strategy


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, what has been computed of it, and the answer so far.

    `tokens` holds prompt and answer; the first `computed` of them are in the KV cache (slot
    `slot`). The last token of an unfinished answer is not: it enters with the next forward pass.
    `spare` are further slots that the strategy branches into. `draft` are tokens that it guesses to
    follow the last one: they are computed with it, each with its logits, as far as there is room.
    `after` is the sequence that computes the first `until` tokens for this one, too, `followed`
    says that samples wait for this one to have done so. `since` is the pass from which on it waits,
    `queue_seconds` what it waited for its first one, `preempted` how often it gave way to others,
    `away` what it held then. `look_at` is the number of tokens of the answer at which to look next
    whether it only repeats itself. `prompt` is how many of the tokens are the prompt's: fewer than
    at first where some `left` a full context; then `tokens` is another list. `known` is what
    another process has told of the answer.
    """

    id: int
    request: Request
    strategy: "Strategy"
    seed: int
    started: float
    slot: int = -1
    spare: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    prompt_seconds: float = 0.0
    queue_seconds: float = 0.0
    last: float = 0.0
    cancelled: bool = False
    after: "Sequence | None" = None
    until: int = 0
    known: Begun = NEW
    followed: bool = False
    since: int = 0
    preempted: int = 0
    away: Away | None = None
    look_at: float = math.inf
    prompt: int = 0
    left: Left = NOTHING
    finish: Finish | None = None
    error: UserError | None = None
    text: list[str] = field(default_factory=list)
    times: list[TokenTime] = field(default_factory=list)
    beams: tuple[Hypothesis, ...] = ()
    top: list[tuple[Ranked, ...]] = field(default_factory=list)
    drafted: int | None = None
    accepted: int = 0
    scores: list[Scored] = field(default_factory=list)  # of the prompt's tokens behind the first

    def __post_init__(self) -> None:
        self.prompt = len(self.request.tokens)

    @property
    def prompting(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.computed < self.prompt

    def shorten(self, shorter: Shorter) -> None:
        """Go on with what stays of the tokens."""
        left, gone = self.left, len(self.tokens) - len(shorter.tokens)
        self.left = replace(
            left, times=left.times + 1, tokens=left.tokens + gone, turns=shorter.turns
        )
        self.tokens, self.prompt = shorter.tokens, shorter.prompt

    def recompute(self, count: int) -> None:
        """Account for tokens that stayed and could not move."""
        self.left = replace(self.left, recomputed=self.left.recomputed + count)

    def restart(self) -> None:
        """Back to the prompt; where repetition is looked for it is from the beginning again."""
        self.tokens, self.prompt, self.left = (
            list(self.request.tokens),
            len(self.request.tokens),
            NOTHING,
        )
        self.look_at = min(self.look_at, EVERY) if self.look_at < math.inf else math.inf

    @property
    def held(self) -> bool:
        """Whether another sequence is computing what this one needs, too."""
        other = self.after
        return (
            other is not None
            and other.slot >= 0
            and other.finish is None
            and other.computed < self.until
        )

    def time(
        self,
        token: int,
        text: str,
        decode: float,
        sample: float,
        logprob: float | None,
        *,
        constraint: float = 0.0,
        forced: bool = False,
    ) -> TokenTime:
        """Account for one token: the gap since the one before, and its parts (seconds in,
        milliseconds out).
        """
        now = time.perf_counter()
        if not self.times:
            decode = self.prompt_seconds
        gap = (now - self.last) * 1e3
        row = TokenTime(
            token, text, gap, decode * 1e3, sample * 1e3, logprob, constraint * 1e3, forced
        )
        self.last = now
        self.times.append(row)
        self.text.append(text)
        return row

    def rank(self, logits: NDArray[np.float32], log_sum: float) -> None:
        """Keep the likeliest of the step that makes the next token; tokens before it that had none
        get none.
        """
        self.top += [()] * (len(self.times) - len(self.top))
        self.top.append(top(logits, self.request.top_logprobs, log_sum))

    def unscored(self, start: int, end: int) -> range:
        """Of the tokens from `start` to `end` those whose rows are to tell how likely the prompt's
        next one is.
        """
        if not self.request.scores:
            return range(0)
        return range(max(start, len(self.scores)), min(end, self.prompt - 1))

    def score(self, rows: Iterator[Row], start: int, end: int) -> None:
        """Read those rows."""
        for at in self.unscored(start, end):
            row, token = next(rows), self.tokens[at + 1]
            log_sum = row.log_sum(row.logits.item(token))
            ranked = (
                top(row.logits, self.request.top_logprobs, log_sum)
                if self.request.top_logprobs
                else ()
            )
            self.scores.append(Scored(row.logits.item(token) - log_sum, ranked))

    def answer(self) -> Answer:
        """The accounts, once finished."""
        assert self.finish is not None
        return Answer(
            "".join(self.text),
            tuple(self.times),
            self.finish,
            len(self.request.tokens),
            self.reused,
            self.prompt_seconds * 1e3,
            self.seed,
            self.beams,
            (*self.top, *[()] * (len(self.times) - len(self.top)))[: len(self.times)]
            if self.top
            else (),
            self.drafted,
            self.accepted,
            self.left,
            self.error,
            tuple(self.scores),
            self.queue_seconds * 1e3,
        )
