"""One request in progress: the mutable state of the engine, besides the ledger."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.kv_cache.context_protocols import Away
from llmcli.runtime.requests.context_overflow import Shorter
from llmcli.runtime.requests.repetition import EVERY
from llmcli.runtime.requests.request import NEW, NOTHING, Answer, Begun, Hypothesis, Left, Request
from llmcli.runtime.sampling.chain import Row
from llmcli.runtime.sampling.top_logprobs import Ranked, Scored, top
from llmcli.types import Finish, TokenTime

if TYPE_CHECKING:  # strategies import Sequence
    from llmcli.runtime.strategies.base import Strategy


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, the part of it that is computed, and the answer so far.

    - `slot`: its llama.cpp sequence id; −1 while it waits. `branch_slots`: further slots of a beam
      search.
    - `tokens`: prompt and answer. The first `n_computed` are in the KV cache; the last token of an
      unfinished answer enters it with the next pass. The list is replaced when tokens are dropped
      from a full context.
    - `n_prompt`: how many of the tokens are the prompt's; fewer than at first when some were
      dropped (`overflow_stats`). `n_reused`: prompt tokens that were cached already.
    - `draft`: guessed tokens after the last one, computed with it as far as there is room.
    - `prefix_source`: the sequence that computes the first `prefix_length` tokens for this one,
      too. `has_samples`: samples wait for this one to compute the prompt.
    - `waiting_since`: the pass since which it waits. `queue_seconds`: its wait before its first
      pass. `n_preempted`: how often it was preempted. `swapped_state`: its state in host memory.
    - `repetition_check_at`: number of answer tokens at which to check next for repetition.
    - `replayed`: what another process already sent of the answer.
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
    scores: list[Scored] = field(default_factory=list)  # of the prompt tokens after the first

    def __post_init__(self) -> None:
        self.prompt = len(self.request.tokens)

    @property
    def prompting(self) -> bool:
        """Return whether prompt tokens are still to be computed."""
        return self.computed < self.prompt

    def shorten(self, shorter: Shorter) -> None:
        """Replace the tokens by the shortened text, and count what was dropped."""
        left, gone = self.left, len(self.tokens) - len(shorter.tokens)
        self.left = replace(
            left, times=left.times + 1, tokens=left.tokens + gone, turns=shorter.turns
        )
        self.tokens, self.prompt = shorter.tokens, shorter.prompt

    def recompute(self, count: int) -> None:
        """Count tokens that were kept but had to be recomputed."""
        self.left = replace(self.left, recomputed=self.left.recomputed + count)

    def restart(self) -> None:
        """Reset to the prompt; the check for repetition starts over."""
        self.tokens, self.prompt, self.left = (
            list(self.request.tokens),
            len(self.request.tokens),
            NOTHING,
        )
        self.look_at = min(self.look_at, EVERY) if self.look_at < math.inf else math.inf

    @property
    def held(self) -> bool:
        """Return whether another sequence is computing a prefix that this one needs."""
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
        """Record one generated token and the time since the previous one. `decode`, `sample` and
        `constraint` are seconds; the result is in milliseconds.
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
        """Record the likeliest tokens of the step that generates the next token. Earlier tokens
        without an entry get an empty one.
        """
        self.top += [()] * (len(self.times) - len(self.top))
        self.top.append(top(logits, self.request.top_logprobs, log_sum))

    def unscored(self, start: int, end: int) -> range:
        """Return the positions from `start` to `end` whose rows give the log-probability of the
        next prompt token; empty unless the request scores its prompt.
        """
        if not self.request.scores:
            return range(0)
        return range(max(start, len(self.scores)), min(end, self.prompt - 1))

    def score(self, rows: Iterator[Row], start: int, end: int) -> None:
        """Record the log-probabilities of prompt tokens from these rows."""
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
        """Return the finished answer with its statistics."""
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
