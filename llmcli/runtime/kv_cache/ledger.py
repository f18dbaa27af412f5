"""Records which KV cells hold which tokens, and decides on prefix matching, sharing and eviction.

All slots (llama.cpp sequence ids) share one unified pool of cells. The cells of a finished answer
stay cached in its slot until other answers need the space, so the next turn of a conversation finds
its prefix there. Some caches cannot be cut back to every earlier token: a sliding window has
dropped its oldest cells, and recurrent state exists only for the last token. Their slots go back to
checkpoints (checkpoints.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llmcli.runtime.binding.kv_state.positions import window_survives_shift
from llmcli.runtime.kv_cache.cells import CellMap
from llmcli.runtime.kv_cache.checkpoints import Checkpoints
from llmcli.runtime.kv_cache.common_prefix import common_prefix, find_gap, match_after_gap
from llmcli.runtime.kv_cache.context_protocols import CacheMemory, CellOwners, SwappedState
from llmcli.runtime.kv_cache.prefix_match import PrefixMatch
from llmcli.runtime.kv_cache.slots import SlotTable

MIN_EVICTED_CELLS = 64  # minimum cells evicted at a time


class Ledger:
    """Assigns slots and cells to answers. It finds cached prefixes of a prompt, shares their cells,
    moves the states of slots to host memory and back, and evicts cells of idle slots.
    """

    def __init__(self, memory: CacheMemory, keeps_idle: bool = True) -> None:
        """`memory`: the context whose cells are managed.

        `keeps_idle`: whether the end of an idle slot can be evicted alone. If False (reproducible
        mode), idle slots are evicted only as a whole, and the pool is then compacted, so that the
        cells of every answer are in token order without holes. llama.cpp would fill holes, and
        because attention sums in cell order, results would round differently.
        """
        self.memory, self.keeps_idle = memory, keeps_idle
        self._slots = SlotTable(memory.n_seq_max)
        self._map = CellMap(memory, self._slots.is_busy)
        self.tokens = self._map.tokens  # of every slot
        # These methods are called for each token. Binding them here saves a call of a wrapper,
        # which is slow right after a pass.
        self.append, self.fork, self.trim = self._map.append, self._map.fork, self._map.trim
        self.keep_branch, self.drop_branches = self._map.keep_branch, memory.drop_branches
        self.restore, self.check = self._map.restore, self._map.check
        self.count_cells = self._map.count_cells
        # Called with an idle slot before cells that only this slot holds are dropped: those after
        # a number of tokens that stay. It may copy the state of the slot to host memory, and then
        # returns True; if no tokens should stay, it also empties the slot (IdleOffload.save).
        self.before_loss: Callable[[int, int], bool] = lambda slot, keep: False
        # Called with the bytes of a checkpoint before it is taken. It may drop other states, and
        # returns whether there is room for it (OffloadStore.make_checkpoint_room).
        self.before_checkpoint: Callable[[int], bool] = lambda nbytes: True
        # Called when the system has no memory for a checkpoint (OffloadStore.lower_budget).
        self.after_memory_error: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        """Return the number of cells in the pool."""
        return self.memory.n_ctx

    @property
    def used_cells(self) -> int:
        """Return the number of cells that hold a token; a shared cell counts once."""
        return self._map.used_cells

    @property
    def can_fork(self) -> bool:
        """Return whether slots may share cells and diverge at any token."""
        return self._map.can_fork

    @property
    def can_branch(self) -> bool:
        """Return whether a slot may become a copy of another one and share all or some of its
        cells. The two may then continue differently.
        """
        return self.can_fork or self.memory.needs_checkpoints

    @property
    def can_share(self) -> bool:
        """Return whether separate answers may share cells. They may not where compaction
        (`keeps_idle` is False) would write each of them back with cells of its own, because its
        state needs them (`shared_length`): the pool may have no room for these.
        """
        return self.can_fork or (self.memory.needs_checkpoints and self.keeps_idle)

    @property
    def scopes(self) -> list[str]:
        """Return the scope of every slot; only slots of one scope share cells."""
        return self._slots.scopes

    def cell_owners(self) -> CellOwners:
        """Return how the cells of the pool are divided between the most recently used slot and all
        others.
        """
        holders = Counter(cell for cells in self._map.cells for cell in cells)
        shared = tuple(holders[cell] > 1 for cell in self._map.cells[self._slots.latest])
        return CellOwners(shared, len(holders) - len(shared), self.size - len(holders))

    def claim_slot_for(
        self,
        tokens: Sequence[int],
        earlier_turns: frozenset[int] = frozenset(),
        can_move: bool = False,
        scope: str = "",
    ) -> tuple[int, int] | None:
        """Claim a slot for a prompt. Return the slot and the number of prompt tokens that are
        already cached in it. Return None when every slot is busy, or when the cells of idle slots
        cannot be evicted now (`has_stranded_cells`).

        At least the last prompt token is left to compute, because its logits are needed. The slot
        with the longest common prefix is reused if it is idle and the prompt continues all of its
        tokens. If the prompt continues only some of them, the slot is cut and reused in two cases:
        it holds one of `earlier_turns` (an earlier turn of the same conversation, now tokenized
        differently), or it would be overwritten next anyway. Otherwise another idle slot is
        claimed. It shares the cells of the common prefix, and the first slot keeps all its tokens.

        `can_move`: if the prompt leaves out a part of a slot's tokens, the cells after that part
        may be moved, as in `apply_overflow`. `scope`: only slots of this scope are reused or
        shared.
        """
        idle = self._slots.idle
        if not idle:
            return None
        if not self.keeps_idle and (
            not self._slots.busy or all(self.tokens[slot] for slot in idle)
        ):
            if self.has_stranded_cells:
                return None
            self.compact()
        scope_slots = [slot for slot in idle if self.scopes[slot] == scope]
        if can_move and (moved := self._claim_moved(tokens, earlier_turns, scope_slots)):
            return moved
        target = self._slot_to_overwrite(idle)
        best, reused = self._find_best_slot(tokens, earlier_turns, scope_slots, scope, target)
        if not reused:
            self._empty_idle(target)
            return self._claim(target, scope), 0
        continued = reused == len(self.tokens[best])
        is_earlier_turn = self._slots.turns[best] in earlier_turns
        may_cut = self.keeps_idle and (
            is_earlier_turn or best == target or not self._can_copy(best, reused)
        )
        with self.checkpoints.keep(best, reused):  # while states are stored
            if best in idle and (continued or may_cut):
                if not continued and not is_earlier_turn:
                    self.before_loss(best, reused)
                reused = self._map.trim(best, reused)
                self.take_checkpoint(best)
                return self._claim(best, scope), reused
            self._empty_idle(target)
            if self.can_fork:
                self._map.share(best, target, 0, reused)
            elif not self._map.copy_prefix(best, target, reused):
                reused = 0
            return self._claim(target, scope), reused

    def _claim(self, slot: int, scope: str) -> int:
        """Mark an idle slot as busy, and return its number."""
        self._slots.claim(slot, scope)
        self._map.count_busy(slot)
        return slot

    def _empty_idle(self, slot: int) -> None:
        """Drop the tokens of an idle slot from the pool, after its state was stored if possible."""
        if self.tokens[slot] and not self.before_loss(slot, 0):
            self._map.trim(slot, 0)

    def claim_named_slot(self, slot: int, tokens: Sequence[int], scope: str = "") -> int:
        """Claim a certain idle slot for a prompt, and cut it to the prefix of the prompt that it
        holds. Return the length of this prefix, which never is the whole prompt. The cells of other
        slots are not shared.
        """
        assert self.keeps_idle and not self._slots.is_busy[slot], slot
        length = self._map.trim(slot, self.reusable_prefix(tokens, scope, slot))
        self.take_checkpoint(slot)
        self._claim(slot, scope)
        return length

    def is_busy(self, slot: int) -> bool:
        """Return whether an answer runs in a slot."""
        return self._slots.is_busy[slot]

    def empty_slot(self, slot: int) -> int:
        """Drop all tokens of an idle slot, and return how many it had."""
        assert not self._slots.is_busy[slot], slot
        count = len(self.tokens[slot])
        self._map.trim(slot, 0)
        return count

    def _find_best_slot(
        self,
        tokens: Sequence[int],
        earlier_turns: frozenset[int],
        scope_slots: list[int],
        scope: str,
        target: int,
    ) -> tuple[int, int]:
        """Return the slot with the longest common prefix with a prompt, and the length of that
        prefix. The slot is −1 if no slot has a common prefix. Among equal lengths, idle slots that
        can be reused are preferred, then slots other than `target`, which is overwritten next.
        `scope_slots`: the idle slots of the scope.
        """
        if self.can_fork:
            reused, holders = self._match(tokens[:-1], scope)
        else:
            lengths = self._reusable_lengths(tokens[:-1], scope)
            reused = max(lengths.values(), default=0)
            holders = {slot for slot, length in lengths.items() if length == reused}
        preferred = {
            slot
            for slot in holders
            if len(self.tokens[slot]) == reused or self._slots.turns[slot] in earlier_turns
        }
        return max(
            sorted(holders),
            key=lambda slot: (
                not self._slots.is_busy[slot],
                slot in preferred,
                slot != target,
            ),
            default=-1,
        ), reused

    def _reusable_lengths(self, tokens: Sequence[int], scope: str) -> dict[int, int]:
        """Return for each slot of the scope how many of `tokens` it can give to a prompt, if slots
        cannot diverge at every token. A busy slot can only be copied. Without `keeps_idle`, only an
        idle slot can be continued, at its end (`can_share`).
        """
        lengths: dict[int, int] = {}
        for slot, cached in enumerate(self.tokens):
            if self.scopes[slot] == scope:
                length, is_busy = common_prefix(cached, tokens), self._slots.is_busy[slot]
                if not self.keeps_idle:
                    lengths[slot] = 0 if is_busy or length < len(cached) else length
                elif is_busy:
                    lengths[slot] = self._checkpoint_length(slot, length)
                else:
                    lengths[slot] = self._reusable_length(slot, length)
        return lengths

    def _reusable_length(self, slot: int, length: int) -> int:
        """Return how many of the first `length` tokens an idle slot can keep, if slots cannot
        diverge at every token: `length` if the slot can be cut there, otherwise those of a
        checkpoint.
        """
        is_whole = length == len(self.tokens[slot])
        can_cut = not self.memory.is_recurrent and self._map.window_holds(slot, length)
        return length if is_whole or can_cut else self._checkpoint_length(slot, length)

    def _checkpoint_length(self, slot: int, length: int) -> int:
        """Return the length of the last checkpoint with at most `length` tokens, or 0."""
        checkpoint = self._map.checkpoints.nearest(slot, length)
        return checkpoint.length if checkpoint else 0

    def _can_copy(self, slot: int, length: int) -> bool:
        """Return whether another slot can get the first `length` tokens of a slot."""
        return self.can_fork or self._checkpoint_length(slot, length) == length

    @property
    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints of all slots."""
        return self._map.checkpoints

    def take_checkpoint(self, slot: int) -> bool:
        """Take a checkpoint at the end of a slot if the memory needs one there, and there is room
        for it. Return whether a checkpoint was taken.
        """
        length, memory = len(self.tokens[slot]), self.memory
        if (
            not memory.needs_checkpoints
            or not length
            or self._checkpoint_length(slot, length) == length
            or not self.before_checkpoint(memory.checkpoint_size(slot))
        ):
            return False
        try:
            self._map.take_checkpoint(slot)
        except MemoryError:
            self.after_memory_error()
            return False
        return True

    def can_return(self, slot: int, n_tokens: int) -> bool:
        """Return whether a slot can be cut to its present length again after its next pass, which
        adds `n_tokens` tokens that may have to be dropped: in general, or to a checkpoint.
        """
        memory, length = self.memory, len(self.tokens[slot])
        return (
            not memory.is_recurrent
            or n_tokens <= memory.n_rs_seq
            or self._checkpoint_length(slot, length) == length
        )

    def drop_checkpoint(self) -> bool:
        """Drop a checkpoint that only slots need: the earliest one of the least recently used slot
        (`Checkpoints.drop`). Return whether there was one.
        """
        return self.checkpoints.drop(self._slots.last_used)

    def match_prefix(
        self, tokens: Sequence[int], scope: str = "", match: PrefixMatch | None = None
    ) -> tuple[int, bool]:
        """Return the length of the longest prefix of a prompt whose cells can be shared, and
        whether a busy slot holds this prefix. The last prompt token does not count, because it must
        be computed. `match`: the result of an earlier call for the same prompt and scope, which is
        brought up to date.
        """
        if not self.can_fork:
            return 0, False
        match = match or PrefixMatch()
        self._map.update_match(match, tokens, self.scopes, scope)
        return match.length, any(self._slots.is_busy[slot] for slot in match.holders)

    def reusable_prefix(
        self, tokens: Sequence[int], scope: str = "", slot: int | None = None
    ) -> int:
        """Return how many tokens of a prompt, without its last, a slot of the scope has for it.
        `slot`: the only slot that may have them; None: any.
        """
        if slot is not None:
            if self.scopes[slot] != scope:
                return 0
            length = common_prefix(self.tokens[slot], tokens[:-1])
            return length if self.can_fork else self._reusable_length(slot, length)
        if self.can_fork:
            return self._match(tokens[:-1], scope)[0]
        return max(self._reusable_lengths(tokens[:-1], scope).values(), default=0)

    def _match(self, tokens: Sequence[int], scope: str) -> tuple[int, set[int]]:
        """Return the length of the longest prefix of `tokens` in a slot of the scope, and the slots
        that hold it.
        """
        return self._map.match(tokens, self.scopes, scope)

    @property
    def latest_tokens(self) -> list[int]:
        """Return the tokens of the most recently used slot."""
        return self.tokens[self._slots.latest]

    def find_nearest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the slot with the longest common prefix with `tokens`, and the length of this
        prefix. Among equal lengths it is the most recently used slot.
        """
        lengths = [common_prefix(mine, tokens) for mine in self.tokens]
        slot = max(
            range(len(lengths)), key=lambda slot: (lengths[slot], self._slots.last_used[slot])
        )
        return slot, lengths[slot]

    def restore_state(
        self,
        tokens: Sequence[int],
        restore: Callable[[int], bool],
        turn: int = 0,
        slot: int | None = None,
        scope: str = "",
    ) -> bool:
        """Fill an idle slot with `tokens` from a saved state. `restore`: a function that writes the
        cells to the slot that it gets, and returns whether it succeeded. `turn`: the number of the
        conversation turn that the tokens belong to. `slot`: a certain idle slot; None: any.
        `scope`: the scope that may reuse the tokens.

        Return False, with the slot empty, when no slot is idle, when too few cells can be freed, or
        when `restore` fails.
        """
        if not self.n_idle:
            return False
        if slot is None:
            slot = self.claim_slot(scope)
        else:
            self.empty_slot(slot)
            self._claim(slot, scope)
        is_restored = (
            self.make_room(len(tokens))
            and restore(slot)
            and self.memory.last_position(slot) == len(tokens) - 1
        )
        if is_restored:
            self.append(slot, list(tokens))
        else:
            self._map.empty_memory(slot)
        self.release(slot, turn)
        return is_restored

    @property
    def n_idle(self) -> int:
        """Return the number of idle slots."""
        return self._slots.n_idle

    @property
    def n_busy(self) -> int:
        """Return the number of busy slots."""
        return len(self.tokens) - self._slots.n_idle

    @property
    def busy_slots(self) -> list[int]:
        """Return the slots of running answers."""
        return self._slots.busy

    @property
    def must_cut_to_claim(self) -> bool:
        """Return whether claiming a slot would cut an idle one and leave holes in the pool, which
        `keeps_idle` False does not allow. This is so when all idle slots hold tokens.
        """
        return not self.keeps_idle and all(
            tokens or busy for tokens, busy in zip(self.tokens, self._slots.is_busy, strict=True)
        )

    def claim_slot(self, scope: str = "") -> int:
        """Claim an idle slot, empty it, and return it. An empty slot is preferred, then the least
        recently used one.
        """
        slot = self._slot_to_overwrite(self._slots.idle)
        self._empty_idle(slot)
        return self._claim(slot, scope)

    @contextmanager
    def keep_prefix(self, tokens: Sequence[int], scope: str = "") -> Iterator[None]:
        """Keep the cells of the prefix `tokens`, if slots of the scope hold it. In the block, one
        of these slots counts as busy, so that it is neither overwritten nor evicted.
        """
        length, holders = self._match(tokens, scope) if tokens else (0, set[int]())
        if not holders or length < len(tokens) or any(self.is_busy(slot) for slot in holders):
            yield
            return
        slot = max(holders, key=self._slots.last_used.__getitem__)
        turn = self._slots.turns[slot]
        self._claim(slot, scope)
        try:
            yield
        finally:
            self.release(slot, turn)

    @property
    def busy_cells(self) -> int:
        """Return the number of cells that busy slots use. These cells cannot be evicted."""
        return self._map.busy_cells

    @property
    def reusable_slots(self) -> list[int]:
        """Return the idle slots that hold tokens, least recently used first."""
        idle = [slot for slot in self._slots.idle if self.tokens[slot]]
        return sorted(idle, key=self._slots.last_used.__getitem__)

    def shared_length(self, slot: int, busy_only: bool = False) -> int:
        """Return the length of the longest prefix whose cells a slot shares with another one, or
        with `busy_only` with a busy one. It is 0 if the slot cannot be restored without these cells
        (`needs_checkpoints`).
        """
        if self.memory.needs_checkpoints:
            return 0
        others = self.busy_slots if busy_only else range(len(self.tokens))
        return max(
            (self._map.count_shared(slot, other) for other in others if other != slot), default=0
        )

    def swap_out(self, slot: int, is_idle: bool = False) -> SwappedState:
        """Copy the state of a slot to host memory, and empty the slot. Cells that another busy slot
        also uses stay in the pool and are left out of the state. If the slot `is_idle`, so are
        those that another idle slot uses; the state is then of no use once they are lost.

        Raises MemoryError, with the slot empty, when the system has no memory for the state.
        """
        start, tokens = self.shared_length(slot, busy_only=not is_idle), tuple(self.tokens[slot])
        checkpoints = self.checkpoints.of_slot(slot)
        try:
            state = self.memory.read_state(slot, start) if start < len(tokens) else memoryview(b"")
        finally:  # reading drops the cells before `start`
            self._map.trim(slot, 0)
        return SwappedState(tokens, start, state, checkpoints)

    def copy_state(self, slot: int) -> SwappedState:
        """Return a copy of the whole state of a slot, which keeps its cells."""
        state = self.memory.read_state(slot)
        return SwappedState(tuple(self.tokens[slot]), 0, state, self.checkpoints.of_slot(slot))

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state from `swap_out` into an empty slot. Return False when too few cells can
        be freed, or when the prefix that the state leaves out is no longer in any slot.
        """
        count, start = len(swapped.tokens), swapped.start
        if not self.make_room(count - start):
            return False
        n_cached, holders = self._match(swapped.tokens[:start], self.scopes[slot])
        if n_cached < start:
            return False
        source = min(holders) if start else -1
        if start == count:
            self._map.share(source, slot, 0, count)
            return True
        is_written = self.memory.write_state(slot, swapped.state, start, source)
        if not is_written or self.memory.last_position(slot) != count - 1:
            self._map.empty_memory(slot)
            return False
        if start:
            self._map.append_shared(source, slot, start)
        self.append(slot, list(swapped.tokens[start:]))
        self.checkpoints.set_slot(slot, swapped.checkpoints)
        return True

    @property
    def has_stranded_cells(self) -> bool:
        """Return whether idle slots hold cells that cannot be evicted before all running answers
        have ended. Evicting them needs compaction (`keeps_idle` is False), and compaction needs
        complete states of the running answers, which this cache cannot save.
        """
        return (
            not self.keeps_idle
            and not self.memory.has_complete_states
            and bool(self.reusable_slots)
            and bool(self.busy_slots)
        )

    def compact(self) -> None:
        """Evict all idle slots, and rewrite the busy ones so that the cells of each are in token
        order without holes.
        """
        self.evict_idle()
        slots = [slot for slot, tokens in enumerate(self.tokens) if tokens]
        states = [(slot, self.swap_out(slot)) for slot in reversed(slots)]
        for slot, swapped in reversed(states):
            is_restored = self.swap_in(slot, swapped)
            assert is_restored, "the pool has room for the states that were in it"

    def apply_overflow(self, slot: int, tokens: Sequence[int], can_move: bool) -> int:
        """Cut a slot to the longest prefix of `tokens` that it can hold without computing, and
        return the length of this prefix.

        With `can_move`, a part of the slot's tokens that `tokens` leaves out is dropped, and the
        cells after it are moved toward the start to close the gap. This needs a memory that can
        shift and no busy slot that shares the cells. Moved keys and values were computed while the
        dropped tokens were still visible, so they differ from recomputed ones.
        """
        cached = self.tokens[slot]
        length = common_prefix(cached, tokens)
        while (
            can_move
            and (gap := find_gap(cached, tokens, length))
            and self._shift(slot, length, length + gap)
        ):
            length += common_prefix(cached[length:], tokens[length:])
        return self._map.trim(slot, length)

    def keep_best_branch(self, slots: list[int], tokens: list[int]) -> int:
        """Cut the slot that has the longest common prefix with `tokens` to this prefix, and empty
        and release the other slots. Return the slot that was cut.
        """
        best = max(slots, key=lambda slot: common_prefix(self.tokens[slot], tokens))
        self._map.trim(best, common_prefix(self.tokens[best], tokens))
        for slot in slots:
            if slot != best:
                self._map.trim(slot, 0)
                self.release(slot)
        return best

    def release(self, slot: int, turn: int = 0) -> None:
        """Mark a slot as idle. Its cells stay cached. `turn`: the number of the conversation turn
        that the cells belong to.
        """
        self._map.uncount_busy(slot)
        self._slots.release(slot, turn)

    def make_room(self, cells: int) -> bool:
        """Evict idle cells until `cells` cells are free, those of the least recently used slot
        first. If its state cannot be stored, tokens are cut from its end. Return False when all
        idle cells together are not enough.
        """
        while (missing := cells - self.size + self.used_cells) > 0:
            evictable = self.reusable_slots
            if not evictable or self.has_stranded_cells:
                return False
            if self.keeps_idle:
                slot = evictable[0]
                n_evicted = max(missing, MIN_EVICTED_CELLS)
                if not self.before_loss(slot, 0):
                    self._map.trim(slot, max(0, len(self.tokens[slot]) - n_evicted))
            else:
                self.compact()
        return True

    def evict_idle(self) -> bool:
        """Evict all cells of idle slots. Return whether there were any."""
        evictable = self.reusable_slots
        for slot in evictable:
            self._empty_idle(slot)
        return bool(evictable)

    def _slot_to_overwrite(self, idle: list[int]) -> int:
        """Return the idle slot whose loss costs least: an empty one if possible, otherwise one
        whose tokens another slot also holds, otherwise any. Among equals it is the least recently
        used one.
        """

        def rank(slot: int) -> tuple[int, int]:
            value = 0 if not self.tokens[slot] else 1 if self._map.is_redundant(slot) else 2
            return value, self._slots.last_used[slot]

        return min(idle, key=rank)

    def _claim_moved(
        self, tokens: Sequence[int], earlier_turns: frozenset[int], idle: list[int]
    ) -> tuple[int, int] | None:
        """Claim an idle slot that holds more of the prompt if a gap in its tokens is closed than
        any slot holds as a plain prefix, and close the gap. Return the slot and the number of
        prompt tokens in it, or None when there is no such slot. If `earlier_turns` is not empty,
        only slots with one of these turns are considered.
        """
        candidates = [
            slot for slot in idle if not earlier_turns or self._slots.turns[slot] in earlier_turns
        ]
        slot = max(
            candidates,
            key=lambda slot: (
                match_after_gap(self.tokens[slot], tokens),
                self._slots.last_used[slot],
            ),
            default=-1,
        )
        if (
            slot < 0
            or match_after_gap(self.tokens[slot], tokens) <= self.find_nearest(tokens)[1]
            or not self.memory.can_shift
        ):
            return None
        return self._claim(slot, self.scopes[slot]), self.apply_overflow(
            slot, tokens[:-1], can_move=True
        )

    def _shift(self, slot: int, start: int, end: int) -> bool:
        """Drop the tokens from `start` to `end` of a slot, and move its later cells toward the
        start. Return False when the memory does not support this, or when a busy slot shares cells
        that would move.
        """
        memory, cells = self.memory, self._map
        holders = [
            other
            for other in range(len(self.tokens))
            if other != slot and cells.count_shared(slot, other) > end
        ]
        if not memory.can_shift or any(self._slots.is_busy[other] for other in holders):
            return False
        first, length = memory.first_position(slot) if memory.n_swa else 0, len(self.tokens[slot])
        if not window_survives_shift(first, start, end, length, memory.n_swa):
            return False
        for other in holders:  # idle slots that share the cells to be moved are cut before them
            cells.trim(other, end)
        cells.shift(slot, start, end)
        return True
