"""Which KV cells hold which tokens: prefix matching, sharing, cutting and eviction.

All slots (llama.cpp sequence ids) share one unified pool of cells. The cells of a finished answer
stay under its slot until they are needed, so the next turn of a conversation finds its prefix. Not
every memory can be cut at every token: a sliding window has lost its oldest cells, and recurrent
state exists only for the last token.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from llmcli.runtime.binding.positions import window_survives_shift
from llmcli.runtime.kv_cache.cells import CellMap
from llmcli.runtime.kv_cache.common_prefix import common_prefix, find_gap, match_after_gap
from llmcli.runtime.kv_cache.context_protocols import CacheMemory, CellOwners, SwappedState
from llmcli.runtime.kv_cache.slots import SlotTable

MIN_EVICTED_CELLS = 64  # minimum cells evicted at a time


class Ledger:
    """The map of cells and the slots in use. It finds prefixes, shares cells, swaps states and
    evicts idle cells.
    """

    def __init__(self, memory: CacheMemory, keeps_idle: bool = True) -> None:
        """`keeps_idle`: False evicts idle slots only as a whole and then compacts the pool, so that
        the cells of every answer are in token order and without holes. Holes would be filled by
        llama.cpp, and because attention sums in cell order, results would round differently.
        """
        self.memory, self.keeps_idle = memory, keeps_idle
        self._map, self._slots = CellMap(memory), SlotTable(memory.n_seq_max)
        self.tokens = self._map.tokens  # of every slot
        # These methods are called for each token. Binding them saves one more call, which would be
        # slow right after a pass.
        self.append, self.fork, self.trim = self._map.append, self._map.fork, self._map.trim
        self.restore, self.check = self._map.restore, self._map.check
        self.count_cells = self._map.count_cells

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
    def scopes(self) -> list[str]:
        """Return the scope of every slot; only slots of one scope share cells."""
        return self._slots.scopes

    def cell_owners(self) -> CellOwners:
        """Return how the most recently used slot shares the pool with the other slots."""
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
        """Claim a slot for a prompt. Return the slot and the number of prompt tokens already in it,
        or None when every slot is busy or idle cells are stranded (`has_stranded_cells`).

        At least the last token is left to compute, because its logits are needed. The slot with the
        longest common prefix is claimed when it is idle and the prompt continues all of its tokens,
        or when it is idle and may be cut: it holds a turn in `earlier_turns` (an earlier turn of
        the same conversation, now spelled differently), or it would be evicted next. Otherwise
        another idle slot is claimed, which shares the cells of the common prefix, and the first
        slot keeps all its tokens.

        `can_move`: when the prompt leaves out a part of a slot's tokens, the cells after that part
        may be moved, as in `apply_overflow`. Only slots of one `scope` are considered.
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
        own = [slot for slot in idle if self.scopes[slot] == scope]
        if can_move and (moved := self._claim_moved(tokens, earlier_turns, own)):
            return moved
        target = self._oldest(idle)
        best, reused = self._best(tokens, earlier_turns, own, scope)
        if not reused:
            self._map.trim(target, 0)
            return self._slots.claim(target, scope), 0
        # Reuse an idle slot when the prompt continues all of it, or when it is the next to be
        # evicted.
        continued = reused == len(self.tokens[best])
        may_cut = self.keeps_idle and (
            self._slots.turns[best] in earlier_turns or best == target or not self.can_fork
        )
        if best in idle and (continued or may_cut):
            reused = self._map.trim(best, reused)
            return self._slots.claim(best, scope), reused
        self._map.trim(target, 0)
        self._map.share(best, target, 0, reused)
        return self._slots.claim(target, scope), reused

    def _best(
        self, tokens: Sequence[int], earlier_turns: frozenset[int], own: list[int], scope: str
    ) -> tuple[int, int]:
        """Return the slot with the longest common prefix with a prompt, and the length of that
        prefix.
        """
        if self.can_fork:
            reused, holders = self._match(tokens[:-1], scope)
        else:  # the cells of a slot cannot be shared
            lengths = {
                slot: self._usable(slot, common_prefix(self.tokens[slot], tokens[:-1]))
                for slot in own
            }
            reused = max(lengths.values(), default=0)
            holders = {slot for slot, length in lengths.items() if length == reused}
        preferred = {
            slot
            for slot in holders
            if len(self.tokens[slot]) == reused or self._slots.turns[slot] in earlier_turns
        }
        return max(
            sorted(holders),
            key=lambda slot: (not self._slots.is_busy[slot], slot in preferred),
            default=-1,
        ), reused

    def _usable(self, slot: int, length: int) -> int:
        """Return how many of the first `length` tokens a slot can keep when its cells cannot be
        shared: all or none.
        """
        is_whole = length == len(self.tokens[slot])
        can_cut = not self.memory.is_recurrent and self._map.window_holds(slot, length)
        return length if is_whole or can_cut else 0

    def match_prefix(self, tokens: Sequence[int], scope: str = "") -> tuple[int, bool]:
        """Return the length of the longest prefix of a prompt that can be shared, and whether a
        busy slot holds that prefix.
        """
        length, holders = self._match(tokens[:-1], scope) if self.can_fork else (0, set[int]())
        return length, any(self._slots.is_busy[slot] for slot in holders)

    def _match(self, tokens: Sequence[int], scope: str) -> tuple[int, set[int]]:
        return self._map.match(tokens, self.scopes, scope)

    @property
    def latest_tokens(self) -> list[int]:
        """Return the tokens of the most recently used slot."""
        return self.tokens[self._slots.latest]

    def find_nearest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the slot with the longest common prefix with these tokens, and the length of that
        prefix. Among equally long prefixes the most recently used slot is returned.
        """
        lengths = [common_prefix(mine, tokens) for mine in self.tokens]
        slot = max(
            range(len(lengths)), key=lambda slot: (lengths[slot], self._slots.last_used[slot])
        )
        return slot, lengths[slot]

    def restore_state(
        self, tokens: Sequence[int], restore: Callable[[int], bool], turn: int
    ) -> bool:
        """Fill an idle slot with `tokens`, whose cells `restore` writes to the slot that it is
        given.

        Return False, with the slot empty, when no slot is idle, cells are missing or `restore`
        fails.
        """
        if not self.n_idle:
            return False
        slot = self.claim_slot()
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
    def busy_slots(self) -> list[int]:
        """Return the slots of running answers."""
        return self._slots.busy

    @property
    def must_cut_to_claim(self) -> bool:
        """Return whether every idle slot holds tokens although nothing may be evicted. Claiming a
        slot would then cut one and leave holes in the pool.
        """
        return not self.keeps_idle and all(
            tokens or busy for tokens, busy in zip(self.tokens, self._slots.is_busy, strict=True)
        )

    def claim_slot(self, scope: str = "") -> int:
        """Claim and empty an idle slot: an empty one first, otherwise the least recently used."""
        slot = self._oldest(self._slots.idle)
        self._map.trim(slot, 0)
        return self._slots.claim(slot, scope)

    @property
    def busy_cells(self) -> int:
        """Return the number of cells of busy slots, which cannot be evicted."""
        return self.count_cells(self.busy_slots)

    @property
    def reusable_slots(self) -> list[int]:
        """Return the idle slots that hold tokens, least recently used first."""
        idle = [slot for slot in self._slots.idle if self.tokens[slot]]
        return sorted(idle, key=self._slots.last_used.__getitem__)

    def swap_out(self, slot: int, all_tokens: bool = False) -> SwappedState:
        """Return the state of a slot, and empty the slot. The state leaves out the longest prefix
        that another busy slot shares, unless `all_tokens` is set.
        """
        others = [] if all_tokens else [other for other in self.busy_slots if other != slot]
        start = max((self._map.count_shared(slot, other) for other in others), default=0)
        tokens = tuple(self.tokens[slot])
        state = self.memory.read_state(slot, start) if start < len(tokens) else memoryview(b"")
        self._map.trim(slot, 0)
        return SwappedState(tokens, start, state)

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state into an empty slot. Return False when cells are missing, or when no slot
        holds the prefix any more that the state leaves out.
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
        return True

    @property
    def has_stranded_cells(self) -> bool:
        """Return whether the idle cells cannot be evicted before every running answer has ended."""
        return (
            not self.keeps_idle
            and not self.memory.has_complete_states
            and bool(self.reusable_slots)
            and bool(self.busy_slots)
        )

    def compact(self) -> None:
        """Evict idle slots, and rebuild the busy ones so that the cells of each are in token order
        and without holes.
        """
        self.evict_idle()
        slots = [slot for slot, tokens in enumerate(self.tokens) if tokens]
        states = [(slot, self.swap_out(slot)) for slot in reversed(slots)]
        for slot, swapped in reversed(states):
            is_restored = self.swap_in(slot, swapped)
            assert is_restored, "what was in the pool fits into it"

    def apply_overflow(self, slot: int, tokens: Sequence[int], can_move: bool) -> int:
        """Make a slot hold as long a prefix of `tokens` as possible. Return the length of that
        prefix.

        With `can_move`, where `tokens` leaves out a part of the slot's tokens, the later cells are
        moved toward the start to close the gap, if the memory supports that and no busy slot shares
        them. Moved keys and values were computed from the dropped tokens, too, so recomputing the
        text would give different ones.
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
        """Keep the slot that has the longest common prefix with `tokens`, and cut it to that
        prefix. Empty and release the other slots. Return the kept slot.
        """
        kept = max(slots, key=lambda slot: common_prefix(self.tokens[slot], tokens))
        self._map.trim(kept, common_prefix(self.tokens[kept], tokens))
        for slot in slots:
            if slot != kept:
                self._map.trim(slot, 0)
                self.release(slot)
        return kept

    def release(self, slot: int, turn: int = 0) -> None:
        """Mark a slot as idle. Its cells stay cached. `turn`: the turn of the conversation that the
        cells hold.
        """
        self._slots.release(slot, turn)

    def make_room(self, cells: int) -> bool:
        """Evict idle cells until `cells` cells are free, beginning with the end of the least
        recently used slot. Return False when evicting does not free enough.
        """
        while (missing := cells - self.size + self.used_cells) > 0:
            evictable = self.reusable_slots
            if not evictable or self.has_stranded_cells:
                return False
            if self.keeps_idle:
                slot = evictable[0]
                n_evicted = max(missing, MIN_EVICTED_CELLS)
                self._map.trim(slot, max(0, len(self.tokens[slot]) - n_evicted))
            else:
                self.compact()
        return True

    def evict_idle(self) -> bool:
        """Evict all idle cells. Return whether there were any."""
        evictable = self.reusable_slots
        for slot in evictable:
            self._map.trim(slot, 0)
        return bool(evictable)

    def _oldest(self, idle: list[int]) -> int:
        """Return the idle slot to overwrite: an empty one first, then one whose tokens another slot
        also holds, then any other; among equals the least recently used.
        """

        def rank(slot: int) -> tuple[int, int]:
            worth = 0 if not self.tokens[slot] else 1 if self._map.is_redundant(slot) else 2
            return worth, self._slots.last_used[slot]

        return min(idle, key=rank)

    def _claim_moved(
        self, tokens: Sequence[int], earlier_turns: frozenset[int], idle: list[int]
    ) -> tuple[int, int] | None:
        """Claim an idle slot that matches more of the prompt after a gap is closed than any slot
        matches by a plain prefix. Return the slot and the number of prompt tokens in it, or None
        when there is no such slot. Only slots with a turn in `earlier_turns` are considered, if it
        is not empty.
        """
        own = [
            slot for slot in idle if not earlier_turns or self._slots.turns[slot] in earlier_turns
        ]
        slot = max(
            own,
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
        return self._slots.claim(slot, self.scopes[slot]), self.apply_overflow(
            slot, tokens[:-1], can_move=True
        )

    def _shift(self, slot: int, start: int, end: int) -> bool:
        """Drop the tokens from `start` to `end` and move the later cells toward the start. Return
        False when the memory does not support it or a busy slot holds cells that would move.
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
