"""A request while it is answered: its tokens, its answer so far and its scheduling state. Which
cells its tokens are in is recorded in kv_cache/ledger.py.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.disk_cache.state_loader import StateLoad
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.kv_cache.prefix_match import PrefixMatch
from llmcli.runtime.requests.context_overflow import ShortenedText
from llmcli.runtime.requests.draft_counts import DraftCounts
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
from llmcli.runtime.requests.thinking import ThinkingTracker
from llmcli.runtime.requests.token_tree import NO_DRAFT, TokenTree
from llmcli.runtime.sampling.chain import PlannedDraw, RowLogits
from llmcli.runtime.sampling.top_logprobs import TokenLogprob, TokenScore, top_logprobs
from llmcli.types import Event, Finish, TokenTime


class DecodingStrategy(Protocol):
    """Decides which tokens follow the prompt of one request: for example sampling, beam search or
    speculative decoding (runtime/strategies/). An object is created when the request is submitted,
    and used until the request is finished.
    """

    slots: int  # number of llama.cpp sequence ids that it needs: one, and one per further branch

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return the slot and the token of each row that the next pass shall compute, besides
        `Sequence.tokens`. Called when all tokens of the sequence are computed. Only a strategy with
        several branches returns rows.
        """
        ...

    def plan_draw(self, sequence: "Sequence", row: int) -> PlannedDraw | None:
        """Return the draw with which the next call of accept() will begin, so that the draws of
        several sequences can be made together. `row`: the number of its row among those of the
        pass, which is not computed yet. Return None if there is no draw, or if it cannot be made
        with others.
        """
        ...

    def next_token(self, sequence: "Sequence") -> int | None:
        """Return the token that accept() will probably append after the planned draw was made, so
        that the pass after it can begin before. Return None if it is not known, if accept() reads
        the row of logits, or if no pass follows.
        """
        ...

    def accept(
        self, sequence: "Sequence", rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Choose the next tokens from the logits `rows` of a pass, which took `pass_seconds`
        seconds. Return the events of the new tokens, and the reason to finish or None.
        """
        ...

    def on_context_shift(self, sequence: "Sequence") -> None:
        """Update the strategy after tokens were dropped from a full context. Called only when
        `slots` is 1.
        """
        ...

    def apply_overflow(self, sequence: "Sequence", max_cells: int) -> None:
        """Drop tokens from a full context, in which the sequence may use `max_cells` cells. Called
        only when `slots` is above 1.
        """
        ...

    def restart(self, sequence: "Sequence") -> None:
        """Start again from the prompt, because the cells were given to other requests. Called only
        when `slots` is above 1.
        """
        ...

    def finish(self, sequence: "Sequence", finish: Finish) -> str:
        """End the answer, and release all slots of the sequence except `sequence.slot`. Return text
        that was not sent yet because it might have been the start of a stop string.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """A prefix that a waiting sequence will share: the first `length` tokens, which `source` is
    computing.
    """

    source: "Sequence"
    length: int


@dataclass(slots=True, eq=False)
class Preemption:
    """How long a sequence has waited, how often it was preempted (it gave up its cells to other
    sequences), and its stored state.
    """

    waiting_since: int = 0  # number of the pass in which the sequence began to wait
    count: int = 0  # how often the sequence was preempted
    # the sequence's cells in host memory; None when they must be recomputed
    state: SwappedState | None = None


@dataclass(slots=True, eq=False)
class DiskRead:
    """The search for the beginning of a prompt on the disk (disk_cache/), which is made once.

    - `load`: the running search; None before it and after it. `is_done`: whether it has ended.
    - `awaited`: the search of another prompt that must end before this one starts: it reads the same
      beginning, or no slot is free for another one.
    - `n_cached`: tokens of the prompt that the pool had before. `length`: tokens that it has because
      of the search.
    """

    load: StateLoad | None = None
    awaited: StateLoad | None = None
    is_done: bool = False
    n_cached: int = 0
    length: int = 0

    @property
    def is_loading(self) -> bool:
        """Return whether the search, or the one before it, is running."""
        return any(load is not None and load.is_running for load in (self.load, self.awaited))


@dataclass(slots=True, eq=False)
class SequenceAccounting:
    """Statistics of an answer: reused tokens, seconds and drafted tokens."""

    n_reused: int = 0  # prompt tokens whose cells were in the cache
    n_from_disk: int = 0  # those of them that were read from the disk
    prompt_seconds: float = 0.0  # seconds of the passes over the prompt
    queue_seconds: float = 0.0  # seconds between the call and the first pass
    n_drafted: int | None = None  # drafted tokens that were checked; None without drafting
    n_accepted: int = 0  # drafted tokens that were right
    n_drafts: int = 0  # drafts that were checked
    drafts: tuple[DraftCounts, ...] = ()  # the checked drafts of each method that has drafted
    n_passes: int = 0  # passes after the first token; 0 without drafting


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that waits, runs or has just finished: its prompt, how much of it is computed, and
    its answer so far.
    """

    id: int
    request: Request
    strategy: DecodingStrategy
    seed: int
    start_time: float  # time.perf_counter() of the user's call
    max_tokens: int = 1 << 62  # tokens of prompt and answer with which the context is full

    # Slots (llama.cpp sequence ids)
    slot: int = -1  # -1 while the sequence waits
    branch_slots: list[int] = field(default_factory=list)  # further slots of a beam search

    # Text
    # Prompt and answer. The last token of an unfinished answer is computed in the next pass. The
    # list is replaced when tokens are dropped from a full context.
    tokens: list[int] = field(default_factory=list)
    # drafted tokens that may follow `tokens`; as many as fit are computed in the next pass
    draft: TokenTree = NO_DRAFT
    n_computed: int = 0  # tokens in the KV cache
    n_prompt: int = 0  # tokens of the prompt that were not dropped
    # ascending lengths of the prompt at which a pass ends, so that a checkpoint can be taken there
    checkpoint_lengths: tuple[int, ...] = ()
    overflow_stats: OverflowStats = NO_OVERFLOW  # counts of dropped tokens

    # Scheduling
    prefix: SharedPrefix | None = None  # a prefix that another sequence computes for this one
    # the cached prefix of the tokens, found while the sequence waits
    match: PrefixMatch = field(default_factory=PrefixMatch)
    # for each prompt that was being computed meanwhile, by the id of its sequence: the length of
    # the common prefix
    common_lengths: dict[int, int] = field(default_factory=dict)
    # whether other samples wait until this sequence has computed the prompt
    has_samples: bool = False
    preemption: Preemption = field(default_factory=Preemption)
    disk_read: DiskRead = field(default_factory=DiskRead)
    is_cancelled: bool = False

    # Answer
    replayed: ReplayedAnswer = NO_REPLAY  # the start that another process has already sent
    thinking: ThinkingTracker | None = None  # follows the thinking; None if nothing does
    # number of answer tokens at which the next check for repetition is due
    repetition_check_at: float = math.inf
    # text of each answer token; after the end also the text that `DecodingStrategy.finish` returned
    text: list[str] = field(default_factory=list)
    times: list[TokenTime] = field(default_factory=list)  # one entry per answer token
    last_token_time: float = 0.0  # time.perf_counter() of the last token
    top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)  # one entry per step
    # scores of the prompt tokens after the first
    prompt_scores: list[TokenScore] = field(default_factory=list)
    beams: tuple[Hypothesis, ...] = ()  # the results of a beam search
    accounting: SequenceAccounting = field(default_factory=SequenceAccounting)
    finish: Finish | None = None
    error: Exception | None = None  # the reason why the answer failed

    def __post_init__(self) -> None:
        self.n_prompt = len(self.request.tokens)

    @property
    def is_too_long(self) -> bool:
        """Return whether the sequence has more tokens than fit into its context."""
        return len(self.tokens) > self.max_tokens

    @property
    def is_prefilling(self) -> bool:
        """Return whether some prompt tokens are not computed yet."""
        return self.n_computed < self.n_prompt

    @property
    def tokens_to_checkpoint(self) -> int:
        """Return how many tokens the next pass may compute before a checkpoint is due."""
        for length in self.checkpoint_lengths:
            if self.n_computed < length:
                return length - self.n_computed
        return len(self.tokens) - self.n_computed

    @property
    def is_constrained(self) -> bool:
        """Return whether the answer has begun a text of a fixed form: that of the grammar of the
        request, which may start after a certain text, or a tool call.
        """
        request, text = self.request, "".join(self.text)
        if request.grammar is not None and request.grammar_after in text:
            return True
        if any(mark in text for mark in request.structure_marks):
            return True
        start = self.thinking.answer_start if self.thinking else 0
        reply = "" if start is None else "".join(self.text[start:]).lstrip()
        return reply.startswith(request.structure_starts)

    def shorten(self, shortened: ShortenedText) -> None:
        """Replace the tokens by a shortened text, after the context was full, and update
        `overflow_stats`. No checkpoint is due in it.
        """
        stats, n_dropped = self.overflow_stats, len(self.tokens) - len(shortened.tokens)
        self.overflow_stats = replace(
            stats,
            times=stats.times + 1,
            tokens=stats.tokens + n_dropped,
            turns=shortened.dropped_turns,
        )
        self.tokens, self.n_prompt = shortened.tokens, shortened.n_prompt
        self.checkpoint_lengths = ()

    def count_recomputed(self, count: int) -> None:
        """Add `count` to the tokens that stayed in the context but had to be recomputed after
        others were dropped.
        """
        self.overflow_stats = replace(
            self.overflow_stats, recomputed=self.overflow_stats.recomputed + count
        )

    def restart(self) -> None:
        """Reset the sequence to its prompt, without any dropped tokens. The next check for
        repetition is due as at the start.
        """
        self.tokens, self.n_prompt = list(self.request.tokens), len(self.request.tokens)
        self.overflow_stats = NO_OVERFLOW
        if self.repetition_check_at < math.inf:
            self.repetition_check_at = min(self.repetition_check_at, TOKENS_BETWEEN_CHECKS)

    @property
    def waits_for_prefix(self) -> bool:
        """Return whether the sequence must wait because another one is still computing the prefix
        that both will share.
        """
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
        """Record one generated token with its text and times, and return the record, whose times
        are in milliseconds. `decode`, `sample` and `constraint` are seconds. The time since the
        previous token is measured here.
        """
        now = time.perf_counter()
        if not self.times:
            decode = self.accounting.prompt_seconds
        gap = (now - self.last_token_time) * 1e3
        entry = TokenTime(
            token, text, gap, decode * 1e3, sample * 1e3, logprob, constraint * 1e3, forced
        )
        self.last_token_time = now
        self.times.append(entry)
        self.text.append(text)
        return entry

    def record_top_logprobs(self, logits: NDArray[np.float32], log_sum: float) -> None:
        """Record the likeliest tokens of the step that generates the next token. Earlier steps
        without a record get an empty one.

        Shapes: logits `[n_vocab]`. `log_sum`: log of the sum of exp(logits).
        """
        self.top_logprobs += [()] * (len(self.times) - len(self.top_logprobs))
        self.top_logprobs.append(top_logprobs(logits, self.request.top_logprobs, log_sum))

    def positions_to_score(self, start: int, end: int) -> range:
        """Return the positions from `start` to `end` whose logits give the log-probability of the
        next prompt token. The range is empty unless the request scores its prompt, and leaves out
        positions that are scored already.
        """
        if not self.request.score_prompt:
            return range(0)
        return range(max(start, len(self.prompt_scores)), min(end, self.n_prompt - 1))

    def record_scores(self, rows: Iterator[RowLogits], start: int, end: int) -> None:
        """Record the log-probabilities of prompt tokens. `rows`: the logits of the positions that
        `positions_to_score(start, end)` returns.
        """
        for position in self.positions_to_score(start, end):
            row, token = next(rows), self.tokens[position + 1]
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
        thinking = self.thinking
        if top_logprobs:
            top_logprobs = [*top_logprobs, *[()] * (len(self.times) - len(top_logprobs))]
        return Answer(
            text="".join(self.text),
            tokens=tuple(self.times),
            finish=self.finish,
            prompt_tokens=len(self.request.tokens),
            cached_tokens=accounting.n_reused,
            disk_tokens=min(accounting.n_from_disk, accounting.n_reused),
            prompt_ms=accounting.prompt_seconds * 1e3,
            seed=self.seed,
            beams=self.beams,
            top_logprobs=tuple(top_logprobs[: len(self.times)]),
            n_drafted=accounting.n_drafted,
            n_accepted=accounting.n_accepted,
            n_drafts=accounting.n_drafts,
            drafts=accounting.drafts,
            n_passes=accounting.n_passes,
            overflow_stats=self.overflow_stats,
            error=self.error,
            prompt_scores=tuple(self.prompt_scores),
            queue_ms=accounting.queue_seconds * 1e3,
            slot=self.slot,
            n_thinking=thinking.n_inside if thinking else 0,
            answer_start=thinking.answer_start if thinking else 0,
        )
