"""One request in progress: the mutable state of the engine, besides the ledger."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.requests.context_overflow import ShortenedText
from llmcli.runtime.requests.repetition import TOKENS_BETWEEN_CHECKS
from llmcli.runtime.requests.request import (
    NO_OVERFLOW,
    NO_REPLAY,
    Answer,
    Hypothesis,
    OverflowStats,
    ReplayedAnswer,
    Request,
)
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.sampling.top_logprobs import TokenLogprob, TokenScore, top_logprobs
from llmcli.types import Event, Finish, TokenTime


class DecodingStrategy(Protocol):
    """How one request is answered; created when it is submitted and used until it is finished."""

    slots: int  # llama.cpp sequence ids that it needs: the prompt's own and `Sequence.branch_slots`

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return (slot, token) of each row of the next pass, when all tokens of the sequence are
        computed.
        """
        ...

    def accept(
        self, sequence: "Sequence", rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Read the rows of a pass that took `pass_seconds` seconds. Return the events of the new
        tokens, and the finish if the answer ends.
        """
        ...

    def on_context_shift(self, sequence: "Sequence") -> None:
        """React to tokens that were dropped from a full context; called when `slots` is 1."""
        ...

    def apply_overflow(self, sequence: "Sequence", max_cells: int) -> None:
        """Drop tokens from a full context, of which the sequence may use `max_cells`; called when
        `slots` is more than 1.
        """
        ...

    def restart(self, sequence: "Sequence") -> None:
        """Start again, because other requests need the cells; called when `slots` is above 1."""
        ...

    def finish(self, sequence: "Sequence", finish: Finish) -> str:
        """End the answer and return the text that was held back. Only `sequence.slot` stays
        claimed.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """The first `length` tokens of a sequence, which `source` computes for both."""

    source: "Sequence"
    length: int


@dataclass(slots=True, eq=False)
class Preemption:
    """The waiting of a sequence."""

    waiting_since: int = 0  # the pass since which it waits
    count: int = 0  # how often it was preempted
    state: SwappedState | None = None  # its state in host memory


@dataclass(slots=True, eq=False)
class SequenceAccounting:
    """What the answer reports besides its tokens."""

    n_reused: int = 0  # prompt tokens that were cached already
    prompt_seconds: float = 0.0  # seconds of the passes over the prompt
    queue_seconds: float = 0.0  # seconds before its first pass
    n_drafted: int | None = None  # guessed tokens that were computed; None without drafting
    n_accepted: int = 0  # guessed tokens that were right


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, the part of it that is computed, and the answer so far."""

    id: int
    request: Request
    strategy: DecodingStrategy
    seed: int
    start_time: float  # time.perf_counter() of the call

    # Slots (llama.cpp sequence ids)
    slot: int = -1  # -1 while it waits
    branch_slots: list[int] = field(default_factory=list)  # further slots of a beam search

    # Text
    # Prompt and answer; the last token of an unfinished answer is computed with the next pass. The
    # list is replaced when tokens are dropped from a full context.
    tokens: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)  # guesses, computed as far as there is room
    n_computed: int = 0  # tokens in the KV cache
    n_prompt: int = 0  # tokens of the prompt, without dropped ones
    overflow_stats: OverflowStats = NO_OVERFLOW  # what was dropped

    # Scheduling
    prefix: SharedPrefix | None = None  # what another sequence computes for this one
    has_samples: bool = False  # samples wait for this one to compute the prompt
    preemption: Preemption = field(default_factory=Preemption)
    is_cancelled: bool = False

    # Answer
    replayed: ReplayedAnswer = NO_REPLAY  # what another process sent already
    repetition_check_at: float = math.inf  # answer tokens at which to check for repetition
    text: list[str] = field(default_factory=list)  # of each token, and of the end
    times: list[TokenTime] = field(default_factory=list)  # of each answer token
    last_token_time: float = 0.0  # time.perf_counter() of the last token
    top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)  # of each step
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of tokens after the first
    beams: tuple[Hypothesis, ...] = ()  # the results of a beam search
    accounting: SequenceAccounting = field(default_factory=SequenceAccounting)
    finish: Finish | None = None
    error: UserError | None = None  # why it failed

    def __post_init__(self) -> None:
        self.n_prompt = len(self.request.tokens)

    @property
    def is_prefilling(self) -> bool:
        """Return whether prompt tokens are still to be computed."""
        return self.n_computed < self.n_prompt

    def shorten(self, shortened: ShortenedText) -> None:
        """Replace the tokens by the shortened text, and count what was dropped."""
        stats, n_dropped = self.overflow_stats, len(self.tokens) - len(shortened.tokens)
        self.overflow_stats = replace(
            stats,
            times=stats.times + 1,
            tokens=stats.tokens + n_dropped,
            turns=shortened.dropped_turns,
        )
        self.tokens, self.n_prompt = shortened.tokens, shortened.n_prompt

    def count_recomputed(self, count: int) -> None:
        """Count tokens that were kept but had to be recomputed."""
        self.overflow_stats = replace(
            self.overflow_stats, recomputed=self.overflow_stats.recomputed + count
        )

    def restart(self) -> None:
        """Reset to the prompt; the check for repetition starts over."""
        self.tokens, self.n_prompt = list(self.request.tokens), len(self.request.tokens)
        self.overflow_stats = NO_OVERFLOW
        if self.repetition_check_at < math.inf:
            self.repetition_check_at = min(self.repetition_check_at, TOKENS_BETWEEN_CHECKS)

    @property
    def waits_for_prefix(self) -> bool:
        """Return whether another sequence is computing a prefix that this one needs."""
        if self.prefix is None:
            return False
        source = self.prefix.source
        is_running = source.slot >= 0 and source.finish is None
        return is_running and source.n_computed < self.prefix.length

    def record_token(
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
            decode = self.accounting.prompt_seconds
        gap = (now - self.last_token_time) * 1e3
        row = TokenTime(
            token, text, gap, decode * 1e3, sample * 1e3, logprob, constraint * 1e3, forced
        )
        self.last_token_time = now
        self.times.append(row)
        self.text.append(text)
        return row

    def record_top_logprobs(self, logits: NDArray[np.float32], log_sum: float) -> None:
        """Record the likeliest tokens of the step that generates the next token. Earlier tokens
        without an entry get an empty one.
        """
        self.top_logprobs += [()] * (len(self.times) - len(self.top_logprobs))
        self.top_logprobs.append(top_logprobs(logits, self.request.top_logprobs, log_sum))

    def positions_to_score(self, start: int, end: int) -> range:
        """Return the positions from `start` to `end` whose rows give the log-probability of the
        next prompt token; empty unless the request scores its prompt.
        """
        if not self.request.score_prompt:
            return range(0)
        return range(max(start, len(self.prompt_scores)), min(end, self.n_prompt - 1))

    def record_scores(self, rows: Iterator[RowLogits], start: int, end: int) -> None:
        """Record the log-probabilities of prompt tokens from these rows."""
        for at in self.positions_to_score(start, end):
            row, token = next(rows), self.tokens[at + 1]
            log_sum = row.log_sum(row.logits.item(token))
            ranked = (
                top_logprobs(row.logits, self.request.top_logprobs, log_sum)
                if self.request.top_logprobs
                else ()
            )
            self.prompt_scores.append(TokenScore(row.logits.item(token) - log_sum, ranked))

    def build_answer(self) -> Answer:
        """Return the finished answer with its statistics."""
        assert self.finish is not None
        accounting, top_logprobs = self.accounting, self.top_logprobs
        if top_logprobs:
            top_logprobs = [*top_logprobs, *[()] * (len(self.times) - len(top_logprobs))]
        return Answer(
            text="".join(self.text),
            tokens=tuple(self.times),
            finish=self.finish,
            prompt_tokens=len(self.request.tokens),
            cached_tokens=accounting.n_reused,
            prompt_ms=accounting.prompt_seconds * 1e3,
            seed=self.seed,
            beams=self.beams,
            top_logprobs=tuple(top_logprobs[: len(self.times)]),
            n_drafted=accounting.n_drafted,
            n_accepted=accounting.n_accepted,
            overflow_stats=self.overflow_stats,
            error=self.error,
            prompt_scores=tuple(self.prompt_scores),
            queue_ms=accounting.queue_seconds * 1e3,
        )
