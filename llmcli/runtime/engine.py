"""The engine: many sequences, one forward pass a step, one thread.

submit() and cancel() change what is wanted, step() advances every sequence once and returns what
happened. It computes; what is read from the logits is each request's strategy's. Templates, terminals and
files are others' business.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from llmcli.errors import UserError
from llmcli.runtime.binding.context import Aborted, NoSlot, Rows
from llmcli.runtime.ledger import Ledger
from llmcli.runtime.overflow import Overflow
from llmcli.runtime.passes import Pass
from llmcli.runtime.pool import Memory
from llmcli.runtime.repetition import EVERY, repeats
from llmcli.runtime.request import Answer, Request
from llmcli.runtime.sampling import SEEDS
from llmcli.runtime.sampling.chain import NativeChains, Row, concrete_seed
from llmcli.runtime.schedule import Crowded, Load, Schedule
from llmcli.runtime.sequence import Sequence
from llmcli.runtime.strategies import strategies
from llmcli.runtime.strategies.base import Means, Speculation, Vocabulary
from llmcli.types import Event, Finish

ALONE = Schedule()


class Forward(Memory, Protocol):
    """What the engine asks of a context: a forward pass, and a memory to keep books of."""

    n_batch: int
    n_outputs: int

    def decode(self, rows: Rows) -> Iterable[Row]: ...


class Engine:
    """Owns the context while it lives; all calls come from one thread (except interrupting the context)."""

    def __init__(
        self, context: Forward, vocabulary: Vocabulary, native: NativeChains | None,
        speculation: Speculation | None = None, keeps: bool = True, schedule: Schedule = ALONE,
    ) -> None:  # fmt: skip
        """`keeps` is the ledger's."""
        self.context, self.schedule = context, schedule
        self.ledger = Ledger(context, keeps)
        self.means = Means(vocabulary, native, self.ledger, speculation)
        self._live: dict[int, Sequence] = {}
        self._answers: dict[int, Answer] = {}
        self._waiting: deque[Sequence] = deque()
        self._count = 0
        self._prompted = self._drawn = 0  # tokens

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._live)

    @property
    def load(self) -> Load:
        """How things stand."""
        waiting, drawn = len(self._waiting), self._drawn + sum(len(one.times) for one in self._live.values())
        return Load(
            len(self._live) - waiting, waiting, 0, self.ledger.used, self.ledger.size, self._prompted, drawn
        )  # fmt: skip

    def check(self) -> None:
        """Compare the books with llama.cpp's own; a difference is a bug and crashes."""
        self.ledger.check()
        busy = sum(1 + len(one.spare) for one in self._live.values() if one.slot >= 0)
        assert self.ledger.idle == self.context.n_seq_max - busy, (self.ledger.idle, busy)

    def submit(self, request: Request) -> int:
        """Queue a request; its id is in every event of it. The prompt must fit the context.

        Raises Crowded where as many wait as may.
        """
        self._admit(1)
        return self._queue(request, concrete_seed(request.sampling.seed)).id

    def sample(self, request: Request, count: int) -> list[int]:
        """Queue `count` answers to one prompt, seeds s, s + 1, …; where cells can be shared it is computed once."""
        self._admit(count)
        seed = concrete_seed(request.sampling.seed)
        first = self._queue(request, seed)
        others = [self._queue(request, (seed + more) % SEEDS, after=first) for more in range(1, count)]
        first.followed = bool(others)
        return [one.id for one in (first, *others)]

    def _admit(self, count: int) -> None:
        most = self.schedule.waiting
        if most is not None and len(self._waiting) + count > most:
            raise Crowded(f"{len(self._waiting)} requests wait already", hint="ask again a little later")

    def _queue(self, request: Request, seed: int, after: Sequence | None = None) -> Sequence:
        assert 0 < len(request.tokens) <= self.context.n_ctx, (len(request.tokens), self.context.n_ctx)
        self._count += 1
        strategy = strategies()[request.strategy](request, seed, self.means)
        assert strategy.slots <= self.context.n_seq_max, (strategy.slots, self.context.n_seq_max)
        started = time.perf_counter() if request.started is None else request.started
        sequence = self._live[self._count] = Sequence(
            self._count, request, strategy, seed, started, tokens=list(request.tokens), last=started, after=after
        )  # fmt: skip
        if not (request.endless or request.ignore_eos):
            sequence.look_at = EVERY
        self._waiting.append(sequence)
        return sequence

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

    def _restore(self, plan: Pass) -> None:
        """Back to before a pass that was not finished: parts of it may be in the cache."""
        for sequence, _ in plan.shares:
            for slot in (sequence.slot, *sequence.spare):
                self.ledger.restore(slot)
            if sequence.computed < len(sequence.tokens):  # else its branches have gone on from there
                sequence.computed = len(self.ledger.tokens[sequence.slot])
            sequence.reused = min(sequence.reused, sequence.computed)

    def _next_token(self) -> Pass | None:
        """The everyday pass: one answer, one token. None: it takes `_plan`.

        A forward pass leaves nothing of ours in the caches, so that every line run between two of them is
        fetched anew: 100 µs of the 5 ms of a token are such lines.
        """
        if len(self._live) != 1:
            return None
        (sequence,) = self._live.values()
        at, tokens = sequence.computed, sequence.tokens
        if len(tokens) - at != 1 or sequence.draft or sequence.slot < 0 or sequence.cancelled:
            return None
        if len(tokens) > self.context.n_ctx or self.ledger.used >= self.ledger.size:
            return None
        return Pass([tokens[at]], [at], [sequence.slot], [True], [(sequence, 1)])

    def _plan(self, events: list[Event]) -> Pass:
        """Single tokens first, then as much prompt as the batch still holds."""
        self._place_waiting()
        plan = Pass()
        placed = [sequence for sequence in self._live.values() if sequence.slot >= 0]
        most = min(self.context.n_batch, self.schedule.rows or self.context.n_batch)
        chunk = self.schedule.chunk or most
        if len(placed) > 1:
            placed.sort(key=lambda one: one.prompting)
        for sequence in placed:
            if sequence.finish is None:
                self._make_way(sequence, len(plan.tokens))
            left, room = len(sequence.tokens) - sequence.computed, most - len(plan.tokens)
            if left > 1:
                room = min(room, chunk)
            count = min(left, room) if left else len(sequence.strategy.pending())
            if count > 0 and sequence.finish is None and self._has_room(sequence, plan, count, events):
                if left:
                    if sequence.draft:
                        self._cut_draft(sequence, len(plan.tokens) + count, alone=len(placed) == 1)
                    plan.add(sequence, count)
                else:
                    plan.branch(sequence, self.ledger)
        return plan

    def _place_waiting(self) -> None:
        """Let those in who wait, the largest priority first, of equals whose client has fewest running."""
        while self._may_run():
            clients = Counter(one.request.client for one in self._live.values() if one.slot >= 0)
            waiting = [one for one in self._waiting if not one.held]
            first = min(
                waiting, key=lambda one: (-one.request.priority, clients[one.request.client], one.id), default=None
            )
            if first is None or not self._place(first):
                return
            self._waiting.remove(first)

    def _may_run(self) -> bool:
        """Whether one more may run."""
        most = self.schedule.running
        return most is None or len(self._live) - len(self._waiting) < most

    def _place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its slots, where there are as many."""
        slots = sequence.strategy.slots
        if self.ledger.idle < slots or not (
            place := self.ledger.place(sequence.request.tokens, sequence.request.path, sequence.request.move)
        ):
            return False
        sequence.slot, sequence.reused = place
        sequence.computed = sequence.reused
        sequence.spare = [self.ledger.claim() for _ in range(slots - 1)]
        return True

    def _has_room(self, sequence: Sequence, plan: Pass, count: int, events: list[Event]) -> bool:
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

    def _cut_draft(self, sequence: Sequence, rows: int, alone: bool) -> None:
        """As much of a draft as there is room for: nothing leaves for a guess, and who has company has rows enough."""
        context, ledger = self.context, self.ledger
        room = min(
            context.n_ctx - len(sequence.tokens), ledger.size - ledger.used - rows, context.n_batch - rows,
            context.n_outputs - 1,
        )  # fmt: skip
        del sequence.draft[max(0, room) if alone else 0 :]

    def _make_way(self, sequence: Sequence, planned: int) -> None:
        """Where the context is full: what the request lets go leaves, and the rest is moved up or computed anew."""
        if sequence.request.overflow is None:
            return
        try:
            if sequence.strategy.slots > 1:
                self._make_way_for_branches(sequence, planned)
            elif len(sequence.tokens) > self.context.n_ctx:
                self._shorten(sequence, sequence.request.overflow)
        except UserError:  # moving failed, and nothing is left of any
            for one in self._live.values():
                if one.slot >= 0:
                    one.computed = min(one.computed, len(self.ledger.tokens[one.slot]))
            raise

    def _shorten(self, sequence: Sequence, overflow: Overflow) -> None:
        args = sequence.tokens, sequence.prompt, sequence.left.turns, self.context.n_ctx
        shorter = overflow.shorten(*args)
        if shorter is None:
            return
        sequence.shorten(shorter)
        sequence.strategy.shortened(sequence)
        sequence.computed = self.ledger.adapt(sequence.slot, sequence.tokens[:-1], overflow.move)
        sequence.recompute(len(sequence.tokens) - 1 - sequence.computed)

    def _make_way_for_branches(self, sequence: Sequence, planned: int) -> None:
        """Branches fill the context with the cells that they do not share."""
        ledger = self.ledger
        count = len(sequence.strategy.pending()) if sequence.computed == len(sequence.tokens) else 0
        if count and not ledger.make_room(planned + count):
            taken = ledger.used - ledger.held([sequence.slot, *sequence.spare])
            sequence.strategy.make_way(sequence, ledger.size - planned - taken)

    def _decode(self, plan: Pass) -> Iterable[Row]:
        rows = Rows(plan.tokens, plan.positions, plan.slots, plan.wants)
        try:
            return self.context.decode(rows)
        except NoSlot:
            if not self.ledger.forget_idle():
                raise
            return self.context.decode(rows)

    def _advance(self, sequence: Sequence, count: int, rows: Iterator[Row], spent: float) -> list[Event]:
        start = sequence.computed
        if start < len(sequence.tokens):
            self.ledger.append(sequence.slot, sequence.tokens[start : start + count])
            if sequence.prompting:
                self._prompted += count
                if not sequence.times and not sequence.left.times:
                    sequence.prompt_seconds += spent
            sequence.computed += count
            if sequence.computed < len(sequence.tokens):
                return []
            if sequence.draft:
                self.ledger.append(sequence.slot, sequence.draft)
        else:
            for slot, token in sequence.strategy.pending():
                self.ledger.append(slot, [token])
        if not sequence.followed:
            return self._accept(sequence, rows, spent)
        sequence.followed = False
        row = next(rows)
        together = (sequence, *self._fork(sequence))
        return [event for one in together for event in self._accept(one, iter((row,)), spent)]

    def _fork(self, first: Sequence) -> list[Sequence]:
        """The samples that begin where this prompt ends, in cells shared with it; those left over wait for a slot."""
        forks: list[Sequence] = []
        for sequence in [one for one in self._waiting if one.after is first and one.strategy.slots == 1]:
            if not self.ledger.forks or not self.ledger.idle or not self._may_run():
                break
            slot = self.ledger.claim()
            self.ledger.fork(first.slot, slot)
            self._waiting.remove(sequence)
            sequence.slot, sequence.computed, sequence.reused = slot, first.computed, first.computed
            sequence.prompt_seconds = first.prompt_seconds
            forks.append(sequence)
        return forks

    def _accept(self, sequence: Sequence, rows: Iterator[Row], spent: float) -> list[Event]:
        events, finish = sequence.strategy.accept(sequence, rows, spent)
        if finish is None and len(sequence.times) >= sequence.look_at:
            sequence.look_at = len(sequence.times) + EVERY
            finish = "repetition" if repeats(sequence.text) else None
        return [*events, self._close(sequence, finish)] if finish else events

    def _close(self, sequence: Sequence, finish: Finish) -> Event:
        rest = sequence.strategy.finish(sequence, finish)
        sequence.text.append(rest)
        sequence.finish = finish
        if sequence.slot >= 0:
            self.ledger.release(sequence.slot, sequence.request.turn)
        else:
            self._waiting.remove(sequence)
        del self._live[sequence.id]
        self._drawn += len(sequence.times)
        self._answers[sequence.id] = sequence.answer()
        return Event(sequence.id, None, rest, finish)
