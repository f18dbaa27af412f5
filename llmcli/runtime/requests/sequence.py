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
    strategy: DecodingStrategy
    seed: int
    start_time: float
    slot: int = -1
    branch_slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    n_computed: int = 0
    n_reused: int = 0
    prompt_seconds: float = 0.0
    queue_seconds: float = 0.0
    last_token_time: float = 0.0
    is_cancelled: bool = False
    prefix_source: "Sequence | None" = None
    prefix_length: int = 0
    replayed: ReplayedAnswer = NO_REPLAY
    has_samples: bool = False
    waiting_since: int = 0
    n_preempted: int = 0
    swapped_state: SwappedState | None = None
    repetition_check_at: float = math.inf
    n_prompt: int = 0
    overflow_stats: OverflowStats = NO_OVERFLOW
    finish: Finish | None = None
    error: UserError | None = None
    text: list[str] = field(default_factory=list)
    times: list[TokenTime] = field(default_factory=list)
    beams: tuple[Hypothesis, ...] = ()
    top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    n_drafted: int | None = None
    n_accepted: int = 0
    prompt_scores: list[TokenScore] = field(
        default_factory=list
    )  # of the prompt tokens after the first

    def __post_init__(self) -> None:
        self.n_prompt = len(self.request.tokens)

    @property
    def is_prefilling(self) -> bool:
        """Return whether prompt tokens are still to be computed."""
        return self.n_computed < self.n_prompt

    def shorten(self, shortened: ShortenedText) -> None:
        """Replace the tokens by the shortened text, and count what was dropped."""
        left, gone = self.overflow_stats, len(self.tokens) - len(shortened.tokens)
        self.overflow_stats = replace(
            left, times=left.times + 1, tokens=left.tokens + gone, turns=shortened.dropped_turns
        )
        self.tokens, self.n_prompt = shortened.tokens, shortened.n_prompt

    def count_recomputed(self, count: int) -> None:
        """Count tokens that were kept but had to be recomputed."""
        self.overflow_stats = replace(
            self.overflow_stats, recomputed=self.overflow_stats.recomputed + count
        )

    def restart(self) -> None:
        """Reset to the prompt; the check for repetition starts over."""
        self.tokens, self.n_prompt, self.overflow_stats = (
            list(self.request.tokens),
            len(self.request.tokens),
            NO_OVERFLOW,
        )
        self.repetition_check_at = (
            min(self.repetition_check_at, TOKENS_BETWEEN_CHECKS)
            if self.repetition_check_at < math.inf
            else math.inf
        )

    @property
    def waits_for_prefix(self) -> bool:
        """Return whether another sequence is computing a prefix that this one needs."""
        other = self.prefix_source
        return (
            other is not None
            and other.slot >= 0
            and other.finish is None
            and other.n_computed < self.prefix_length
        )

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
            decode = self.prompt_seconds
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
        return Answer(
            "".join(self.text),
            tuple(self.times),
            self.finish,
            len(self.request.tokens),
            self.n_reused,
            self.prompt_seconds * 1e3,
            self.seed,
            self.beams,
            (*self.top_logprobs, *[()] * (len(self.times) - len(self.top_logprobs)))[
                : len(self.times)
            ]
            if self.top_logprobs
            else (),
            self.n_drafted,
            self.n_accepted,
            self.overflow_stats,
            self.error,
            tuple(self.prompt_scores),
            self.queue_seconds * 1e3,
        )
