"""Decide which requests run, which wait, and what the next forward pass computes.

A pass first gets the next tokens of running answers, then pieces of prompts: the prompt with the
fewest tokens left first, but the oldest prompt always gets a share. A request is admitted when its
prompt fits beside the cells in use and the cells that running answers will soon need. When cells
run short anyway, the request with the lowest priority (among equals, the youngest) is preempted:
its cells are swapped to host memory or recomputed later, and it resumes when there is room. A beam
search, which shows nothing before its end, starts again. Only a request that is too long for the
whole pool ends as context_full.

A prompt that starts like one that is being computed waits for it and then shares its cells
(`Sequence.waits_for_prefix`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from llmcli.errors import UserError
from llmcli.runtime.engine.forward_pass import TILE_ROWS, ForwardPass, choose_prefill_rows
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.engine.waiting_queue import WaitingQueue
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.context_protocols import BatchedMemory
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.offload import (
    DecodeOffload,
    IdleOffload,
    OffloadStore,
    PreemptionSwap,
)
from llmcli.runtime.requests.context_overflow import OverflowPolicy
from llmcli.runtime.requests.sequence import Sequence

# pending tokens (for example forced by a grammar) up to which an answer still counts as decoding
MAX_FORCED_TOKENS = 16
RESERVED_CELLS = 32  # cells that each running answer is expected to need soon
RESERVED_FRACTION = 8  # at most 1/8 of the pool is reserved for all of them
MIN_SHARED_PREFIX = 32  # tokens that two prompts must share before one waits for the other
MAX_ADMIT_TRIES = 4  # waiting requests that are tried when the first does not fit
STARVATION_PASSES = 64  # passes after which no other request may overtake a waiting one
OLDEST_PREFILL_SHARE = 4  # the oldest prompt gets 1/4 of the rows left for prompts


class Scheduler:
    """Assigns slots to requests and plans forward passes; strategies decide what the answers
    contain.
    """

    def __init__(self, context: BatchedMemory, ledger: Ledger, schedule: Schedule) -> None:
        self.context, self.ledger, self.schedule = context, ledger, schedule
        self.running: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.offload_store = OffloadStore(ledger, schedule.offload_bytes)
        self.swap = PreemptionSwap(self.offload_store)
        self.idle_offload = IdleOffload(self.offload_store)
        self.decode_offload = DecodeOffload(self.offload_store)
        self.n_passes = self.n_preemptions = 0
        self.row_seconds = 0.0  # moving average of seconds per row, over passes with many rows
        self.last_was_prefill = False  # whether the last pass computed prompts only

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue."""
        self.waiting.add(sequence, self.n_passes)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence; its cells stay cached for later prefix matches."""
        if sequence.slot >= 0:
            self.ledger.release(sequence.slot, sequence.request.turn)
            del self.running[sequence.id]
            return
        self.waiting.remove(sequence, self.n_passes)
        if sequence.swapped_state:
            self.swap.drop(sequence.swapped_state)

    def record_pass(self, rows: int, seconds: float) -> None:
        """Record the duration of a pass. `rows`: its rows; `seconds`: wall time."""
        self.n_passes += 1
        each = seconds / rows
        if rows >= TILE_ROWS or (
            rows > MAX_FORCED_TOKENS and each < self.row_seconds
        ):  # a slow small pass would shrink the following passes further and further
            self.row_seconds += (each - self.row_seconds) / 8 if self.row_seconds else each
            self.swap.record_pass(rows, seconds)

    def next_pass(self) -> tuple[ForwardPass, Sequence | None]:
        """Return the next pass, or the sequence that must end first because the pool is too small
        for it.

        The pass is empty when a sequence is returned.
        """
        self._admit_waiting()
        while True:
            made = ForwardPass()
            short = self._fill(made)
            if short is None:
                self.last_was_prefill = all(share.sequence.is_prefilling for share in made.shares)
                return made, None
            if len(short.tokens) > self.context.n_ctx or not self.preempt_one():
                return ForwardPass(), short

    @property
    def is_steady(self) -> bool:
        """Return whether nothing waits and every running sequence needs only a few tokens."""
        return not self.waiting and not any(map(self._long, self.running.values()))

    def _long(self, sequence: Sequence) -> bool:
        return (
            sequence.is_prefilling or len(sequence.tokens) - sequence.n_computed > MAX_FORCED_TOKENS
        )

    def preempt_one(self) -> bool:
        """Preempt the least important sequence to free cells. Return False when it is the only one
        that runs and no idle cells are stranded.
        """
        if len(self.running) < 2 and not self.ledger.has_stranded_cells:
            return False
        self._preempt(max(self.running.values(), key=lambda one: (-one.request.priority, one.id)))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        ledger, slot = self.ledger, sequence.slot
        del self.running[sequence.id]
        if sequence.strategy.slots > 1:
            sequence.strategy.restart(sequence)
            for spare in sequence.branch_slots:
                ledger.trim(spare, 0)
                ledger.release(spare)
        else:
            sequence.swapped_state = self.swap.swap_out(slot)
        ledger.release(slot, sequence.request.turn)
        sequence.slot, sequence.branch_slots, sequence.draft, sequence.n_computed = -1, [], [], 0
        sequence.n_preempted += 1
        self.n_preemptions += 1
        self.add(sequence)
        if not ledger.keeps_idle and not ledger.has_stranded_cells:
            ledger.compact()

    # Admission

    def has_capacity(self) -> bool:
        """Return whether the limit of running requests allows one more."""
        most = self.schedule.max_running
        return most is None or len(self.running) < most

    def _admit_waiting(self) -> None:
        tried: set[int] = set()
        while self.waiting and self.has_capacity() and self.ledger.n_idle:
            ranked = [
                one
                for one in self.waiting.in_order(self.n_passes, self.running.values())
                if one.id not in tried
            ]
            first = next((one for one in ranked if not self._waits_for_prefix(one)), None)
            if first is None:
                return
            if self._place(first):
                if self.schedule.max_idle_cells is not None and self.ledger.keeps_idle:
                    self.idle_offload.offload_idle(self.schedule.max_idle_cells)
                continue
            tried.add(first.id)
            if (
                len(tried) == MAX_ADMIT_TRIES
                or self.n_passes - first.waiting_since > STARVATION_PASSES
            ):
                return

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Return whether another sequence computes a prefix that this one needs, and record it."""
        if sequence.waits_for_prefix:
            return True
        if not self.ledger.can_fork or sequence.request.score_prompt:
            return False
        tokens, scope = sequence.tokens, self.sharing_scope(sequence)
        twins = {
            other: same
            for other in self.running.values()
            if other.is_prefilling
            and self.sharing_scope(other) == scope
            and (same := min(common_prefix(other.tokens, tokens), other.n_prompt, len(tokens) - 1))
            > other.n_computed
        }
        other = max(twins, key=twins.__getitem__, default=None)
        if (
            other is None
            or twins[other] < self.ledger.match_prefix(tokens, scope)[0] + MIN_SHARED_PREFIX
        ):
            return False
        sequence.prefix_source, sequence.prefix_length = other, twins[other]
        return True

    def sharing_scope(self, sequence: Sequence) -> str:
        """Return the client whose cached cells the sequence may share; empty when all clients
        share.
        """
        return "" if self.schedule.share_prefixes else sequence.request.client

    def admit_fork(self, first: Sequence, sequence: Sequence) -> bool:
        """Admit a sample that starts where the prompt of `first` ends, in cells shared with it.
        Return False when it must wait.
        """
        if (
            not self.ledger.can_fork
            or not self.ledger.n_idle
            or self.ledger.must_cut_to_claim
            or not self.has_capacity()
        ):
            return False
        slot = self.ledger.claim_slot(self.sharing_scope(sequence))
        self.ledger.fork(first.slot, slot)
        sequence.slot, sequence.n_computed, sequence.n_reused = (
            slot,
            first.n_computed,
            first.n_computed,
        )
        sequence.prompt_seconds = first.prompt_seconds
        self._run(sequence)
        return True

    def _run(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence, self.n_passes)
        self.running[sequence.id] = sequence

    def _place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its slots. Return False when slots or cells are missing."""
        ledger, slots, request = self.ledger, sequence.strategy.slots, sequence.request
        if ledger.n_idle < slots or self._must_run_alone(sequence):
            return False
        if not sequence.swapped_state and not request.score_prompt:
            self.idle_offload.restore_prefix(sequence.tokens, self.sharing_scope(sequence))
        if not self._fits(sequence):
            return False
        away, sequence.swapped_state = sequence.swapped_state, None
        if away is not None:
            if ledger.must_cut_to_claim:
                ledger.compact()
            slot = ledger.claim_slot(self.sharing_scope(sequence))
            if self.swap.swap_in(slot, away):
                sequence.slot, sequence.n_computed = slot, len(away.tokens)
                self._run(sequence)
                return True
            ledger.release(slot)
        known = (
            sequence.tokens[:1] if request.score_prompt else sequence.tokens
        )  # too few tokens to evict or copy anything for
        place = ledger.claim_slot_for(
            known, request.earlier_turns, request.can_move_cells, self.sharing_scope(sequence)
        )
        if place is None:
            return False
        sequence.slot, sequence.n_computed = place
        if not sequence.n_preempted:
            sequence.n_reused = sequence.n_computed
        sequence.branch_slots = [
            ledger.claim_slot(self.sharing_scope(sequence)) for _ in range(slots - 1)
        ]
        self._run(sequence)
        return True

    def _must_run_alone(self, sequence: Sequence) -> bool:
        """Return whether the sequence must not run beside the others: a beam search leaves holes in
        the pool, which must not be filled in reproducible mode.
        """
        searches = sequence.strategy.slots > 1 or any(
            one.strategy.slots > 1 for one in self.running.values()
        )
        return bool(self.running) and not self.ledger.keeps_idle and searches

    def _fits(self, sequence: Sequence) -> bool:
        """Return whether its tokens fit beside the cells in use and the cells reserved for running
        answers.
        """
        if not self.running:
            return True
        length, in_use = self.ledger.match_prefix(sequence.tokens, self.sharing_scope(sequence))
        need = len(sequence.tokens) - (
            length if in_use and not sequence.request.score_prompt else 0
        )
        size, many = self.ledger.size, len(self.running) + sequence.strategy.slots
        return (
            self.ledger.busy_cells + need + min(RESERVED_CELLS * many, size // RESERVED_FRACTION)
            <= size
        )

    # Planning a pass

    def _rows(self, decoding: int) -> int:
        """Return the maximum rows of a pass in which `decoding` answers take part."""
        most = min(self.context.n_batch, self.schedule.max_rows or self.context.n_batch)
        gap = self.schedule.max_gap_seconds
        if gap is None or not decoding:
            return most if gap is None else min(most, self.context.n_ubatch)
        wished = (
            int(gap / self.row_seconds)
            if self.row_seconds
            else self.context.n_ubatch // OLDEST_PREFILL_SHARE
        )
        step = (
            TILE_ROWS
            if wished >= TILE_ROWS or self.schedule.min_offload_rows
            else MAX_FORCED_TOKENS
        )
        # Round to the nearest multiple: rounding down left passes too short to use the tiles of
        # flash attention.
        nearest = (wished + step // 2) // step * step
        return min(most, max(nearest, step, decoding + MAX_FORCED_TOKENS))

    def _order(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the decoding sequences and those with many tokens to compute, each in serving
        order.
        """
        short: list[Sequence] = []
        long: list[Sequence] = []
        for one in self.running.values():
            (long if self._long(one) else short).append(one)
        if len(short) > 1:
            short.sort(key=lambda one: (-one.request.priority, one.id))
        if len(long) > 1:
            long.sort(
                key=lambda one: (-one.request.priority, len(one.tokens) - one.n_computed, one.id)
            )
        return short, long

    def _split_prefills(
        self, short: list[Sequence], long: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Return the prompts that are long enough for a separate pass, and those computed together
        with decoding answers.
        """
        least = self.schedule.min_prefill_rows
        if least is None:
            rows = sum(len(one.tokens) - one.n_computed for one in long)
            return (long, []) if short and self._long_enough(rows) else ([], long)
        apart = [one for one in long if len(one.tokens) - one.n_computed >= least]
        return apart, [one for one in long if one not in apart]

    def _long_enough(self, rows: int) -> bool:
        """Return whether decodes can be offloaded, and the pass has enough rows to pay for it."""
        ledger, least = self.ledger, self.schedule.min_offload_rows
        return (
            least is not None
            and rows >= least
            and ledger.can_fork
            and ledger.keeps_idle
            and ledger.memory.has_complete_states
        )

    @contextmanager
    def decodes_offloaded(self, plan: ForwardPass) -> Iterator[None]:
        """Compute a pass while the cells of decoding sequences outside it are offloaded, if it is
        long enough.
        """
        if not self._long_enough(len(plan.tokens)):
            yield
            return
        slots = set(plan.slots)
        others = [
            one
            for one in self.running.values()
            if one.slot not in slots and one.strategy.slots == 1
        ]
        try:
            with self.decode_offload.offload_slots([one.slot for one in others]):
                yield
        finally:
            for one in others:
                one.n_computed = min(one.n_computed, len(self.ledger.tokens[one.slot]))

    def _fill(self, made: ForwardPass) -> Sequence | None:
        """Add the rows of a pass. Return the sequence that has no cells for its rows, or None."""
        short, long = self._order()
        alone, going = len(self.running) == 1, len(short)
        apart, long = self._split_prefills(short, long)
        if apart and not (self.last_was_prefill and (short or long)):
            full = self._fill_up(made, apart, going)
            if made.tokens:
                return full
        for sequence in short:
            self._apply_overflow(sequence, len(made.tokens))
            if len(sequence.tokens) > self.context.n_ctx:
                return sequence
            left = len(sequence.tokens) - sequence.n_computed
            room = self.context.n_batch - len(made.tokens)
            count = min(left, room) or len(sequence.strategy.pending_rows())
            if not room or count > room:
                continue
            if not self.ledger.make_room(len(made.tokens) + count):
                return sequence
            self._add(made, sequence, count, alone)
        return self._fill_up(made, long, going) if long else None

    def _fill_up(self, made: ForwardPass, long: list[Sequence], going: int) -> Sequence | None:
        """Fill the rest of the pass with pieces of prompts, beside `going` decoding answers. Return
        the sequence that has no cells for its rows, or None.
        """
        rows = self._rows(max(going, len(made.tokens)))
        oldest = min(long, key=lambda one: (-one.request.priority, one.id))
        reserve = (rows - len(made.tokens)) // OLDEST_PREFILL_SHARE
        for sequence in long:
            self._apply_overflow(sequence, len(made.tokens))
            if len(sequence.tokens) > self.context.n_ctx:
                return sequence
            reserve = 0 if sequence is oldest else reserve
            left = len(sequence.tokens) - sequence.n_computed
            count = min(
                left, rows - len(made.tokens) - reserve, self.schedule.max_chunk_rows or left
            )
            if count <= 0:
                continue
            if not (self.schedule.max_rows or self.schedule.max_chunk_rows):
                count = choose_prefill_rows(
                    left, count, len(made.tokens), self.context.n_batch, self.context.n_ubatch
                )
            count = min(count, self._outputs(made, sequence, len(long)))
            if not count:
                continue
            if not self.ledger.make_room(len(made.tokens) + count):
                count = self.ledger.size - self.ledger.used_cells - len(made.tokens)
            if count > 0:
                self._add(made, sequence, count, len(self.running) == 1)
            elif not made.tokens or any(
                self._has_lower_priority(other, sequence) for other in self.running.values()
            ):
                return sequence
        return None

    def _outputs(self, made: ForwardPass, sequence: Sequence, prompts: int) -> int:
        """Return the maximum rows that a prompt may add under the limit of logits rows. When every
        row of the prompt needs logits, one is left for each other prompt.
        """
        left = self.context.n_outputs - sum(made.wants_logits)
        if left <= 0:
            return 0
        return max(1, left - prompts) if sequence.request.score_prompt else self.context.n_batch

    def _has_lower_priority(self, other: Sequence, sequence: Sequence) -> bool:
        """Return whether `other` is preempted before `sequence`."""
        return (-other.request.priority, other.id) > (-sequence.request.priority, sequence.id)

    def _add(self, made: ForwardPass, sequence: Sequence, count: int, alone: bool) -> None:
        if sequence.n_computed == len(sequence.tokens):
            made.add_branches(sequence, self.ledger)
            return
        if sequence.draft:
            self._cut_draft(sequence, len(made.tokens) + count, alone)
        made.add_tokens(sequence, count)

    def _cut_draft(self, sequence: Sequence, rows: int, alone: bool) -> None:
        """Cut the draft to the free cells and rows: nothing is evicted for a guess. A sequence that
        does not run alone drafts nothing.
        """
        context, ledger = self.context, self.ledger
        room = min(
            context.n_ctx - len(sequence.tokens),
            ledger.size - ledger.used_cells - rows,
            context.n_batch - rows,
            context.n_outputs - 1,
        )
        del sequence.draft[max(0, room) if alone else 0 :]

    # Context overflow

    def _apply_overflow(self, sequence: Sequence, planned: int) -> None:
        """Drop what the request allows from a full context; the remaining cells are moved or
        recomputed.
        """
        if sequence.request.overflow is None:
            return
        try:
            if sequence.strategy.slots > 1:
                self._apply_branch_overflow(sequence, planned)
            elif len(sequence.tokens) > self.context.n_ctx:
                self._shorten(sequence, sequence.request.overflow)
        except UserError:  # moving failed and cleared the whole memory
            for one in self.running.values():
                one.n_computed = min(one.n_computed, len(self.ledger.tokens[one.slot]))
            raise

    def _shorten(self, sequence: Sequence, overflow: OverflowPolicy) -> None:
        args = sequence.tokens, sequence.n_prompt, sequence.overflow_stats.turns, self.context.n_ctx
        shorter = overflow.shorten(*args)
        if shorter is None:
            return
        sequence.shorten(shorter)
        sequence.strategy.on_context_shift(sequence)
        sequence.n_computed = self.ledger.apply_overflow(
            sequence.slot, sequence.tokens[:-1], overflow.can_move_cells
        )
        sequence.count_recomputed(len(sequence.tokens) - 1 - sequence.n_computed)

    def _apply_branch_overflow(self, sequence: Sequence, planned: int) -> None:
        """Shorten all branches when they fill the context; other sequences' idle cells are evicted
        first.
        """
        ledger = self.ledger
        count = (
            len(sequence.strategy.pending_rows())
            if sequence.n_computed == len(sequence.tokens)
            else 0
        )
        if count and len(self.running) == 1 and not ledger.make_room(planned + count):
            sequence.strategy.apply_overflow(sequence, ledger.size - planned)
