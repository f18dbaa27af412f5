"""The engine: many sequences, one forward pass a step, one thread.

submit() and cancel() change what is wanted, step() advances every sequence once and returns what
happened. It computes; what is read from the logits is each request's strategy's. Templates,
terminals and files are others' business.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol, TypeVar

from llmcli.errors import UserError
from llmcli.runtime.binding.context import Aborted, NoSlot, Rows
from llmcli.runtime.ledger import Ledger
from llmcli.runtime.passes import Pass, Share
from llmcli.runtime.pool import Pool
from llmcli.runtime.repetition import EVERY, repeats
from llmcli.runtime.request import NEW, Answer, Request
from llmcli.runtime.sampling import SEEDS
from llmcli.runtime.sampling.chain import NativeChains, Row, concrete_seed
from llmcli.runtime.schedule import Crowded, Load, Schedule
from llmcli.runtime.scheduler import Scheduler
from llmcli.runtime.sequence import Sequence
from llmcli.runtime.strategies import strategies
from llmcli.runtime.strategies.base import Means, Speculation, Vocabulary
from llmcli.types import Event, Finish

ALONE = Schedule()
Work = TypeVar("Work", Pass, Rows)


class Forward(Pool, Protocol):
    """What the engine asks of a context: a forward pass, and a memory to keep books of."""

    def decode(self, rows: Rows) -> SequenceOf[Row]: ...

    def interrupt(self) -> None: ...


class Reading(Protocol):
    """What may compute prompts elsewhere, so that afterwards they are as if the context had
    (reader.py).
    """

    def takes(self, plan: Pass) -> bool: ...

    def read(self, plan: Pass) -> SequenceOf[Row]: ...


class Engine:
    """Owns the context while it lives; all calls come from one thread (except interrupting the
    context).
    """

    def __init__(
        self,
        context: Forward,
        vocabulary: Vocabulary,
        native: NativeChains | None,
        speculation: Speculation | None = None,
        keeps: bool = True,
        schedule: Schedule = ALONE,
        reader: Reading | None = None,
    ) -> None:
        """`keeps` is the ledger's."""
        self.context, self.reader, self.ledger = context, reader, Ledger(context, keeps)
        self.scheduler = Scheduler(context, self.ledger, schedule)
        self.means = Means(vocabulary, native, self.ledger, speculation)
        self._live: dict[int, Sequence] = {}
        self._answers: dict[int, Answer] = {}
        self._passing: Pass | None = None  # what is computed just now
        self._count = 0
        self._prompted = self._drawn = 0  # tokens

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._live)

    @property
    def steady(self) -> bool:
        """Whether the next pass will be much like the last: the same answers go on, and nothing is
        to be read.
        """
        return self.scheduler.steady

    @property
    def load(self) -> Load:
        """How things stand."""
        scheduler, drawn = (
            self.scheduler,
            self._drawn + sum(len(one.times) for one in self._live.values()),
        )
        return Load(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.waiting.preempted,
            self.ledger.used,
            self.ledger.size,
            self._prompted,
            drawn,
            scheduler.preemptions,
        )

    @property
    def schedule(self) -> Schedule:
        """How passes are shared out; it may be set while nothing runs."""
        return self.scheduler.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.scheduler.schedule = schedule
        for kept in (self.scheduler.swap, self.scheduler.parking, self.scheduler.aside):
            kept.most = schedule.swap_bytes

    def check(self) -> None:
        """Compare the books with llama.cpp's own; a difference is a bug and crashes."""
        self.ledger.check()
        busy = sum(1 + len(one.spare) for one in self.scheduler.running.values())
        assert self.ledger.idle == self.context.n_seq_max - busy, (self.ledger.idle, busy)

    def submit(self, request: Request) -> int:
        """Queue a request; its id is in every event of it. The prompt must fit the context.

        Raises Crowded where as many wait as may.
        """
        self._admit(1)
        return self._queue(request, concrete_seed(request.sampling.seed)).id

    def sample(self, request: Request, count: int) -> list[int]:
        """Queue `count` answers to one prompt, seeds s, s + 1, …; where cells can be shared it is
        computed once.
        """
        self._admit(count)
        seed = concrete_seed(request.sampling.seed)
        first = self._queue(request, seed)
        others = [
            self._queue(request, (seed + more) % SEEDS, more, first) for more in range(1, count)
        ]
        first.followed = bool(others)
        return [one.id for one in (first, *others)]

    def _admit(self, count: int) -> None:
        most, waiting = self.scheduler.schedule.waiting, len(self.scheduler.waiting)
        if most is not None and waiting + count > most:
            raise Crowded(f"{waiting} requests wait already", hint="ask again a little later")

    def _queue(
        self, request: Request, seed: int, number: int = 0, after: Sequence | None = None
    ) -> Sequence:
        assert 0 < len(request.tokens) <= self.context.n_ctx, (
            len(request.tokens),
            self.context.n_ctx,
        )
        self._count += 1
        strategy = strategies()[request.strategy](request, seed, self.means)
        assert strategy.slots <= self.context.n_seq_max, (strategy.slots, self.context.n_seq_max)
        started = time.perf_counter() if request.started is None else request.started
        sequence = self._live[self._count] = Sequence(
            self._count,
            request,
            strategy,
            seed,
            started,
            tokens=list(request.tokens),
            last=started,
            after=after,
            until=len(request.tokens),
            known=request.known[number] if request.known else NEW,
        )
        if not (request.endless or request.ignore_eos):
            sequence.look_at = EVERY
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: int) -> None:
        """End a sequence at the next step; its cells and its text so far are kept. Callable from
        any thread.

        Where most of a long pass is being computed for it alone, the pass is broken off, and the
        others' rows in it are computed again.
        """
        live, passing = (
            self._live.get(sequence),
            self._passing,
        )  # looked up once: the engine goes on meanwhile
        if live:
            live.cancelled = True
            if passing and passing.mostly(live):
                self.context.interrupt()

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
        planned = plan is None
        if plan is None:
            events += [
                self._close(one, "cancelled") for one in tuple(self._live.values()) if one.cancelled
            ]
            plan, over = self.scheduler.next()
            while over:
                events.append(self._close(over, "context_full"))
                plan, over = self.scheduler.next()
            if not plan.tokens:
                return events
            self._passing = plan
        begun = time.perf_counter()
        try:
            if not planned:
                rows = self._decode(plan)
            elif self.reader and self.reader.takes(plan):
                rows = self._with_room(self.reader.read, plan)
            else:
                with self.scheduler.alone(plan):
                    rows = self._decode(plan)
        except Aborted:
            self._restore(plan)
            return events
        except UserError:
            self._restore(plan)
            raise
        except NoSlot:  # a window's own cells, which the books do not count
            if self.scheduler.yield_to():
                return events
            return [*events, self._close(plan.shares[-1].sequence, "context_full")]
        finally:
            self._passing = (
                None  # else who is cancelled now would break off the next pass, of others
            )
        spent = time.perf_counter() - begun
        if planned:
            self.scheduler.saw(len(plan.tokens), spent)
        at = 0
        for sequence, count, wanted in plan.shares:
            events += self._advance(sequence, count, iter(rows[at : at + wanted]), spent)
            at += wanted
        return events

    def _restore(self, plan: Pass) -> None:
        """Back to before a pass that was not finished: parts of it may be in the cache."""
        for sequence, _, _ in plan.shares:
            for slot in (sequence.slot, *sequence.spare):
                self.ledger.restore(slot)
            if sequence.computed < len(
                sequence.tokens
            ):  # else its branches have gone on from there
                sequence.computed = len(self.ledger.tokens[sequence.slot])
            sequence.reused = min(sequence.reused, sequence.computed)

    def _next_token(self) -> Pass | None:
        """The everyday pass: one answer, one token. None: it takes the scheduler.

        A forward pass leaves nothing of ours in the caches, so that every line run between two of
        them is fetched anew: 100 µs of the 5 ms of a token are such lines.
        """
        if len(self._live) != 1:
            return None
        (sequence,) = self._live.values()
        at, tokens = sequence.computed, sequence.tokens
        if len(tokens) - at != 1 or sequence.draft or sequence.slot < 0 or sequence.cancelled:
            return None
        if len(tokens) > self.context.n_ctx or self.ledger.used >= self.ledger.size:
            return None
        return Pass([tokens[at]], [at], [sequence.slot], [True], [Share(sequence, 1, 1)])

    def _decode(self, plan: Pass) -> SequenceOf[Row]:
        return self._with_room(
            self.context.decode, Rows(plan.tokens, plan.positions, plan.slots, plan.wants)
        )

    def _with_room(self, compute: Callable[[Work], SequenceOf[Row]], work: Work) -> SequenceOf[Row]:
        """What it computes; where there was no room, once more without what is idle."""
        try:
            return compute(work)
        except NoSlot:
            if not self.ledger.forget_idle():
                raise
            return compute(work)

    def _advance(
        self, sequence: Sequence, count: int, rows: Iterator[Row], spent: float
    ) -> list[Event]:
        start, told = sequence.computed, list[Event]()
        if start < len(sequence.tokens):
            self.ledger.append(sequence.slot, sequence.tokens[start : start + count])
            if sequence.prompting:
                self._prompted += count
                if not sequence.times and not sequence.left.times:
                    if not sequence.prompt_seconds:
                        sequence.queue_seconds = max(
                            0.0, time.perf_counter() - spent - sequence.started
                        )
                    sequence.prompt_seconds += spent
            sequence.score(rows, start, start + count)
            sequence.computed += count
            if sequence.computed < len(sequence.tokens):
                return []
            if sequence.scores and not sequence.times:
                told.append(Event(sequence.id, None, "", prompt=tuple(sequence.scores)))
            if sequence.draft:
                self.ledger.append(sequence.slot, sequence.draft)
        else:
            for slot, token in sequence.strategy.pending():
                self.ledger.append(slot, [token])
        if not sequence.followed:
            return told + self._accept(sequence, rows, spent)
        sequence.followed = False
        row = next(rows)
        together = (sequence, *self._fork(sequence))
        return told + [
            event for one in together for event in self._accept(one, iter((row,)), spent)
        ]

    def _fork(self, first: Sequence) -> list[Sequence]:
        """The samples that begin where this prompt ends, in cells shared with it; those left over
        wait for a slot.
        """
        waiting = [
            one for one in self.scheduler.waiting if not one.preempted
        ]  # else it is further on than its prompt
        same = [one for one in waiting if one.after is first and one.request is first.request]
        placed = [
            one for one in same if one.strategy.slots == 1 and self.scheduler.place_fork(first, one)
        ]
        for one in placed:
            one.queue_seconds = first.queue_seconds
        return placed

    def _accept(self, sequence: Sequence, rows: Iterator[Row], spent: float) -> list[Event]:
        try:
            events, finish = sequence.strategy.accept(sequence, rows, spent)
        except UserError as error:
            sequence.error = error  # the others go on
            return [self._close(sequence, "failed")]
        if finish is None and len(sequence.times) >= sequence.look_at:
            sequence.look_at = len(sequence.times) + EVERY
            finish = "repetition" if repeats(sequence.text) else None
        return [*events, self._close(sequence, finish)] if finish else events

    def _close(self, sequence: Sequence, finish: Finish) -> Event:
        rest = sequence.strategy.finish(sequence, finish)
        sequence.text.append(rest)
        sequence.finish = finish
        self.scheduler.leave(sequence)
        del self._live[sequence.id]
        self._drawn += len(sequence.times)
        self._answers[sequence.id] = sequence.answer()
        return Event(sequence.id, None, rest, finish)
