"""The engine: many sequences, one forward pass a step, one thread.

submit() and cancel() change what is wanted, step() advances every sequence once and returns what
happened. It knows logits and tokens; templates, terminals and files are others' business.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.context import Aborted, NoSlot, Rows
from llmcli.runtime.ledger import Ledger, Memory
from llmcli.runtime.request import Answer, Request
from llmcli.runtime.sampling.chain import NativeChains, Row, concrete_seed, make_chain
from llmcli.runtime.sequence import Sequence
from llmcli.runtime.text import Decoder
from llmcli.types import Event, Finish


class Forward(Memory, Protocol):
    """What the engine asks of a context: a forward pass, and a memory to keep books of."""

    n_batch: int

    def decode(self, rows: Rows) -> Iterable[Row]: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine asks of a model: a token's bytes, and whether it ends the answer."""

    piece: Callable[[int], bytes]
    ends: Callable[[int], bool]


@dataclass(slots=True)
class _Plan:
    """One pass: its rows, and how many of them each sequence owns (in order)."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wants: list[bool] = field(default_factory=list)
    shares: list[tuple[Sequence, int]] = field(default_factory=list)

    def add(self, sequence: Sequence, count: int) -> None:
        start = sequence.computed
        self.tokens += sequence.tokens[start : start + count]
        self.positions += range(start, start + count)
        self.slots += [sequence.slot] * count
        last = start + count == len(sequence.tokens)
        self.wants += [False] * (count - 1) + [last]
        self.shares.append((sequence, count))


class Engine:
    """Owns the context while it lives; all calls come from one thread (except interrupting the context)."""

    def __init__(self, context: Forward, vocabulary: Vocabulary, native: NativeChains | None) -> None:
        self.context, self.vocabulary, self.native = context, vocabulary, native
        self.ledger = Ledger(context)
        self._live: dict[int, Sequence] = {}
        self._answers: dict[int, Answer] = {}
        self._waiting: deque[Sequence] = deque()
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._live)

    def submit(self, request: Request) -> int:
        """Queue a request; its id is in every event of it. The prompt must fit the context."""
        assert 0 < len(request.tokens) <= self.context.n_ctx, (len(request.tokens), self.context.n_ctx)
        self._count += 1
        seed = concrete_seed(request.sampling.seed)
        started = time.perf_counter() if request.started is None else request.started
        sequence = self._live[self._count] = Sequence(
            self._count,
            request,
            make_chain(request.sampling, seed, self.native),
            Decoder(request.stops),
            seed,
            started,
            tokens=list(request.tokens),
            last=started,
        )
        self._waiting.append(sequence)
        return self._count

    def cancel(self, sequence: int) -> None:
        """End a sequence at the next step; its cells and its text so far are kept."""
        if live := self._live.get(sequence):  # looked up once: another thread may ask while it ends here
            live.cancelled = True

    def drop(self, sequence: int) -> None:
        """End a sequence at once, because nobody will ask for its answer; its cells are kept."""
        if live := self._live.get(sequence):
            self._close(live, "cancelled")
        self._answers.pop(sequence, None)

    def answer(self, sequence: int) -> Answer:
        """The accounts of a finished sequence; they can be taken once."""
        return self._answers.pop(sequence)

    def step(self) -> list[Event]:
        """Advance every sequence by one forward pass."""
        events: list[Event] = []
        plan = self._next_token()
        if plan is None:
            events += [self._close(one, "cancelled") for one in tuple(self._live.values()) if one.cancelled]
            plan = self._plan(events)
            if not plan.tokens:
                return events
        begun = time.perf_counter()
        try:
            rows = iter(self._decode(plan))
        except Aborted:
            self._restore(plan)
            return events
        except UserError:
            self._restore(plan)
            raise
        except NoSlot:
            victim = plan.shares[-1][0]  # the newest gives way; the others lose nothing
            return [*events, self._close(victim, "context_full")]
        spent = time.perf_counter() - begun
        for sequence, count in plan.shares:
            events += self._advance(sequence, count, rows, spent)
        return events

    def _restore(self, plan: _Plan) -> None:
        """Back to before a pass that was not finished: parts of it may be in the cache."""
        for sequence, _ in plan.shares:
            self.ledger.restore(sequence.slot)
            sequence.computed = len(self.ledger.tokens[sequence.slot])
            sequence.reused = min(sequence.reused, sequence.computed)

    def _next_token(self) -> _Plan | None:
        """The everyday pass: one answer, one token. None: it takes `_plan`.

        A forward pass leaves nothing of ours in the caches, so that every line run between two of them is
        fetched anew: 100 µs of the 5 ms of a token are such lines.
        """
        if len(self._live) != 1:
            return None
        (sequence,) = self._live.values()
        at, tokens = sequence.computed, sequence.tokens
        if len(tokens) - at != 1 or sequence.slot < 0 or sequence.cancelled:
            return None
        if len(tokens) > self.context.n_ctx or self.ledger.used >= self.ledger.size:
            return None
        return _Plan([tokens[at]], [at], [sequence.slot], [True], [(sequence, 1)])

    def _plan(self, events: list[Event]) -> _Plan:
        """Single tokens first, then as much prompt as the batch still holds."""
        while self._waiting and (place := self.ledger.place(self._waiting[0].request.tokens)):
            sequence = self._waiting.popleft()
            sequence.slot, sequence.reused = place
            sequence.computed = sequence.reused
        plan = _Plan()
        placed = [sequence for sequence in self._live.values() if sequence.slot >= 0]
        if len(placed) > 1:
            placed.sort(key=lambda one: one.prompting)
        for sequence in placed:
            count = min(len(sequence.tokens) - sequence.computed, self.context.n_batch - len(plan.tokens))
            if count > 0 and sequence.finish is None and self._has_room(sequence, plan, count, events):
                plan.add(sequence, count)
        return plan

    def _has_room(self, sequence: Sequence, plan: _Plan, count: int, events: list[Event]) -> bool:
        """Whether the pass may grow by this sequence; where cells are short the newest answer gives way."""
        if len(sequence.tokens) > self.context.n_ctx:
            events.append(self._close(sequence, "context_full"))
            return False
        while not self.ledger.make_room(len(plan.tokens) + count):
            planned = {one.id for one, _ in plan.shares}
            newest = next(one for one in reversed(self._live.values()) if one.slot >= 0 and one.id not in planned)
            events.append(self._close(newest, "context_full"))
            if newest is sequence:
                return False
        return True

    def _decode(self, plan: _Plan) -> Iterable[Row]:
        rows = Rows(plan.tokens, plan.positions, plan.slots, plan.wants)
        try:
            return self.context.decode(rows)
        except NoSlot:
            if not self.ledger.forget_idle():
                raise
            return self.context.decode(rows)

    def _advance(self, sequence: Sequence, count: int, rows: Iterator[Row], spent: float) -> list[Event]:
        start = sequence.computed
        self.ledger.append(sequence.slot, sequence.tokens[start : start + count])
        if sequence.prompting:
            sequence.prompt_seconds += spent
        sequence.computed += count
        if sequence.computed < len(sequence.tokens):
            return []
        row = next(rows)
        if not sequence.times and np.isnan(row.logits).any():  # once an answer: a damaged file shows at once
            raise UserError(
                "the model computes no numbers (NaN): its weights are damaged",
                hint="fetch the file again, or make it anew",
            )
        if sequence.request.max_tokens == 0:
            return [self._close(sequence, "length")]
        # Before the draw: whoever reads the row first waits for the memory, and this one computes meanwhile.
        log_sum = row.log_sum(sequence.near) if sequence.request.logprobs else None
        begun = time.perf_counter()
        token = sequence.chain.draw(row, sequence.tokens)
        while self.vocabulary.ends(token):
            if not sequence.request.ignore_eos:
                return [self._close(sequence, "stop")]
            row.logits[token] = -np.inf  # as llama.cpp: an ignored end is never drawn
            token = sequence.chain.draw(row, sequence.tokens)
        sample = time.perf_counter() - begun
        logprob = None
        if log_sum is not None:
            sequence.near = float(row.logits[token])
            logprob = sequence.near - log_sum
        sequence.tokens.append(token)
        text = sequence.decoder.feed(self.vocabulary.piece(token))
        event = Event(sequence.id, sequence.time(token, text, spent, sample, logprob), text)
        if sequence.decoder.stopped:
            return [event, self._close(sequence, "stop")]
        if len(sequence.times) == sequence.request.max_tokens:
            return [event, self._close(sequence, "length")]
        return [event]

    def _close(self, sequence: Sequence, finish: Finish) -> Event:
        rest = sequence.decoder.finish()
        sequence.text.append(rest)
        sequence.finish = finish
        sequence.chain.close()
        if sequence.slot >= 0:
            self.ledger.release(sequence.slot)
        else:
            self._waiting.remove(sequence)
        del self._live[sequence.id]
        self._answers[sequence.id] = sequence.answer()
        return Event(sequence.id, None, rest, finish)
