"""Which KV cells hold which tokens: prefix matching, sharing, cutting and eviction.

All slots (llama.cpp sequence ids) share one unified pool of cells. The cells of a finished answer
stay under its slot until they are needed, so the next turn of a conversation finds its prefix. The
memory says what it supports: a sliding window that has moved on and recurrent state cannot be cut
at any token.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from llmcli.errors import UserError
from llmcli.runtime.binding.positions import window_survives_shift
from llmcli.runtime.kv_cache.cells import Cells
from llmcli.runtime.kv_cache.common_prefix import common_prefix, find_gap, match_after_gap
from llmcli.runtime.kv_cache.context_protocols import CacheMemory, CellOwners, SwappedState

MIN_EVICTED_CELLS = 64  # minimum cells evicted at a time


class Ledger(Cells):
    """The map of cells and the slots in use: finds prefixes, shares cells, swaps states, evicts
    idle cells.
    """

    def __init__(self, memory: CacheMemory, keeps_idle: bool = True) -> None:
        """`keeps_idle` False: an answer starts in an empty pool, and nothing is evicted while
        others run. llama.cpp fills holes, and attention sums in cell order, so results round
        differently when the cells are not in token order.
        """
        super().__init__(memory)
        self.keeps_idle, count = keeps_idle, memory.n_seq_max
        self._busy = [False] * count
        self._used_at = [0] * count
        self._turns = [0] * count
        self.scopes = [""] * count  # only slots of one scope share cells
        self._clock = 0

    def cell_owners(self) -> CellOwners:
        """Return how the most recently used slot shares the pool with the others."""
        latest = max(range(len(self._cells)), key=self._used_at.__getitem__)
        holders = Counter(cell for cells in self._cells for cell in cells)
        mine = tuple(holders[cell] > 1 for cell in self._cells[latest])
        return CellOwners(mine, len(holders) - len(mine), self.size - len(holders))

    def claim_slot_for(
        self,
        tokens: Sequence[int],
        path: frozenset[int] = frozenset(),
        move: bool = False,
        scope: str = "",
    ) -> tuple[int, int] | None:
        """Claim a slot for a prompt. Return the slot and the number of prompt tokens already in it,
        or None when every slot is busy.

        At least the last token is left to compute, because its logits are needed. The slot with the
        longest common prefix is reused when it is idle and the prompt continues it, or when it
        holds a turn in `path` (an earlier turn of the same conversation, now spelled differently).
        Otherwise its cells are shared and the rest of its tokens stays. `move`: cells after a part
        that the prompt leaves out may be moved up, as in `apply_overflow`. Only slots of one
        `scope` are considered.
        """
        idle = [slot for slot, busy in enumerate(self._busy) if not busy]
        if not idle:
            return None
        if not self.keeps_idle and (
            len(idle) == len(self._busy) or all(self.tokens[slot] for slot in idle)
        ):
            if self.has_stranded_cells:
                return None
            self.compact()
        own = [slot for slot in idle if self.scopes[slot] == scope]
        if move and (moved := self._place_moved(tokens, path, own)):
            return moved
        target = self._oldest(idle)
        best, reused = self._best(tokens, path, own, scope)
        if not reused:
            self._cut(target, 0)
            return self._taken(target, scope), 0
        # Reuse an idle slot when the prompt continues all of it, or when it is the next to be
        # evicted.
        continued = reused == len(self.tokens[best])
        may_cut = self.keeps_idle and (
            self._turns[best] in path or best == target or not self.can_fork
        )
        if best in idle and (continued or may_cut):
            reused = self._cut(best, reused)
            return self._taken(best, scope), reused
        self._cut(target, 0)
        self._share(best, target, 0, reused)
        return self._taken(target, scope), reused

    def _best(
        self, tokens: Sequence[int], path: frozenset[int], own: list[int], scope: str
    ) -> tuple[int, int]:
        """Return the slot with the longest prefix of a prompt, and the length of that prefix."""
        if self.can_fork:
            reused, holders = self._match(tokens[:-1], scope)
        else:  # the cells of a slot cannot be shared
            alike = {
                slot: self._usable(slot, common_prefix(self.tokens[slot], tokens[:-1]))
                for slot in own
            }
            reused = max(alike.values(), default=0)
            holders = {slot for slot, length in alike.items() if length == reused}
        last = {
            slot
            for slot in holders
            if len(self.tokens[slot]) == reused or self._turns[slot] in path
        }
        return max(
            sorted(holders), key=lambda slot: (not self._busy[slot], slot in last), default=-1
        ), reused

    def _usable(self, slot: int, length: int) -> int:
        """Return how many of the first `length` tokens a slot can keep when it cannot be shared."""
        whole = length == len(self.tokens[slot])
        return (
            length
            if whole or (not self.memory.is_recurrent and self._window_holds(slot, length))
            else 0
        )

    def _taken(self, slot: int, scope: str) -> int:
        self._busy[slot], self.scopes[slot] = True, scope
        self._touch(slot)
        return slot

    def match_prefix(self, tokens: Sequence[int], scope: str = "") -> tuple[int, bool]:
        """Return the length of the longest shareable prefix of a prompt, and whether a busy slot
        holds it.
        """
        length, holders = self._match(tokens[:-1], scope) if self.can_fork else (0, set[int]())
        return length, any(self._busy[slot] for slot in holders)

    def _match(self, tokens: Sequence[int], scope: str) -> tuple[int, set[int]]:
        """Match a prompt against the radix tree, after adding the tokens appended since the last
        lookup.
        """
        for slot, held in enumerate(self.tokens):
            if len(held) > self._prefixes.lengths[slot]:
                self._prefixes.extend(slot, held, self.scopes[slot])
        return self._prefixes.match(tokens, scope)

    @property
    def latest_tokens(self) -> list[int]:
        """Return the tokens of the most recently used slot."""
        return self.tokens[max(range(len(self.tokens)), key=self._used_at.__getitem__)]

    def find_nearest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the slot with the longest prefix of these tokens and its length; among equals the
        most recently used slot.
        """
        lengths = [common_prefix(mine, tokens) for mine in self.tokens]
        slot = max(range(len(lengths)), key=lambda slot: (lengths[slot], self._used_at[slot]))
        return slot, lengths[slot]

    def restore_state(
        self, tokens: Sequence[int], restore: Callable[[int], bool], turn: int
    ) -> bool:
        """Fill an idle slot with tokens whose cells `restore` brings.

        Return False, with the slot empty, when no slot is idle, cells are missing or `restore`
        fails.
        """
        if not self.n_idle:
            return False
        slot = self.claim_slot()
        good = self.make_room(len(tokens)) and restore(slot)
        if good and self.memory.last_position(slot) == len(tokens) - 1:
            self.append(slot, list(tokens))
        else:
            emptied = self.memory.trim(slot, 0)
            assert emptied, "a memory that cannot even be emptied"
            good = False
        self.release(slot, turn)
        return good

    @property
    def n_idle(self) -> int:
        """Return the number of idle slots."""
        return self._busy.count(False)

    @property
    def busy_slots(self) -> list[int]:
        """Return the slots of running answers."""
        return [slot for slot, busy in enumerate(self._busy) if busy]

    @property
    def must_cut_to_claim(self) -> bool:
        """Return whether claiming a slot would cut another one, and so leave holes where nothing
        may be evicted.
        """
        return not self.keeps_idle and all(
            held or busy for held, busy in zip(self.tokens, self._busy, strict=True)
        )

    def claim_slot(self, scope: str = "") -> int:
        """Claim and empty an idle slot: an empty one first, otherwise the least recently used."""
        slot = self._oldest([slot for slot, busy in enumerate(self._busy) if not busy])
        self._cut(slot, 0)
        return self._taken(slot, scope)

    @property
    def busy_cells(self) -> int:
        """Return the number of cells of busy slots, which cannot be evicted."""
        return self.count_cells(self.busy_slots)

    @property
    def reusable_slots(self) -> list[int]:
        """Return the idle slots that hold tokens, least recently used first."""
        idle = [slot for slot, busy in enumerate(self._busy) if not busy and self.tokens[slot]]
        return sorted(idle, key=self._used_at.__getitem__)

    def swap_out(self, slot: int, all_tokens: bool = False) -> SwappedState:
        """Return the state of the tokens that no other busy slot holds (or all with `all_tokens`),
        and empty the slot.
        """
        others = [] if all_tokens else [other for other in self.busy_slots if other != slot]
        start = max((self._shared(slot, other) for other in others), default=0)
        held = tuple(self.tokens[slot])
        state = self.memory.read_state(slot, start) if start < len(held) else memoryview(b"")
        away = SwappedState(held, start, state)
        self._cut(slot, 0)
        return away

    def swap_in(self, slot: int, swapped: SwappedState) -> bool:
        """Restore a state into an empty slot. Return False when cells are missing or the shared
        prefix is gone.
        """
        count, start = len(swapped.tokens), swapped.start
        if not self.make_room(count - start):
            return False
        found, holders = self._match(swapped.tokens[:start], self.scopes[slot])
        if found < start:
            return False
        source = min(holders) if start else -1
        if start == count:
            self._share(source, slot, 0, count)
            return True
        good = self.memory.write_state(slot, swapped.state, start, source)
        if not good or self.memory.last_position(slot) != count - 1:
            emptied = self.memory.trim(slot, 0)
            assert emptied, "a memory that cannot even be emptied"
            return False
        if start:
            self.tokens[slot] += swapped.tokens[:start]
            self._cells[slot] += self._cells[source][:start]
        self.append(slot, list(swapped.tokens[start:]))
        return True

    @property
    def has_stranded_cells(self) -> bool:
        """Return whether idle cells exist that can be evicted only after every running answer has
        ended.
        """
        return (
            not self.keeps_idle
            and not self.memory.has_complete_states
            and bool(self.reusable_slots)
            and bool(self.busy_slots)
        )

    def compact(self) -> None:
        """Evict idle slots and rebuild the others, each with its cells in token order and without
        holes.
        """
        self.evict_idle()
        slots = [slot for slot, held in enumerate(self.tokens) if held]
        out = [(slot, self.swap_out(slot)) for slot in reversed(slots)]
        for slot, away in reversed(out):
            back = self.swap_in(slot, away)
            assert back, "what was in the pool fits into it"

    def apply_overflow(self, slot: int, tokens: Sequence[int], move: bool) -> int:
        """Make a slot hold the longest possible prefix of `tokens`. Return its length.

        With `move`, cells after a part that `tokens` leave out are moved up, if the memory supports
        that and no other slot holds them. Moved keys and values keep the influence of the dropped
        tokens; recomputing the text would give different ones.
        """
        held = self.tokens[slot]
        at = common_prefix(held, tokens)
        while (
            move
            and (left_out := find_gap(held, tokens, at))
            and self._shift(slot, at, at + left_out)
        ):
            at += common_prefix(held[at:], tokens[at:])
        return self._cut(slot, at)

    def keep_best_branch(self, slots: list[int], tokens: list[int]) -> int:
        """Keep the slot with the longest common prefix with `tokens`, cut to that prefix; empty and
        release the others. Return the kept slot.
        """
        kept = max(slots, key=lambda slot: common_prefix(self.tokens[slot], tokens))
        self._cut(kept, common_prefix(self.tokens[kept], tokens))
        for slot in slots:
            if slot != kept:
                self._cut(slot, 0)
                self.release(slot)
        return kept

    def release(self, slot: int, turn: int = 0) -> None:
        """Mark a slot as idle. Its cells stay cached; `turn` is the turn of the conversation that
        they hold.
        """
        self._busy[slot], self._turns[slot] = False, turn
        self._touch(slot)

    def make_room(self, cells: int) -> bool:
        """Evict idle cells, least recently used slot first and from its end, until `cells` are
        free. Return False when that is not enough.
        """
        while (missing := cells - self.size + self.used_cells) > 0:
            left = self.reusable_slots
            if not left:
                return False
            if self.has_stranded_cells:
                return False
            if self.keeps_idle:
                slot = left[0]
                self._cut(slot, max(0, len(self.tokens[slot]) - max(missing, MIN_EVICTED_CELLS)))
            else:
                self.compact()
        return True

    def evict_idle(self) -> bool:
        """Evict all idle cells. Return whether there were any."""
        left = self.reusable_slots
        for slot in left:
            self._cut(slot, 0)
        return bool(left)

    def _oldest(self, idle: list[int]) -> int:
        """Return the idle slot to overwrite: an empty one, then one whose tokens another slot also
        holds, then the least recently used.
        """

        def worth(slot: int) -> tuple[int, int]:
            held = len(self.tokens[slot])
            known = self._prefixes.lengths[slot] == held
            return 0 if not held else 1 if known and self._prefixes.is_redundant(
                slot
            ) else 2, self._used_at[slot]

        return min(idle, key=worth)

    def _place_moved(
        self, tokens: Sequence[int], path: frozenset[int], idle: list[int]
    ) -> tuple[int, int] | None:
        """Reuse an idle slot of the same conversation that matches more of the prompt once a gap is
        closed. Return None when no slot is better than a plain prefix match.
        """
        own = [slot for slot in idle if not path or self._turns[slot] in path]
        slot = max(
            own,
            key=lambda slot: (match_after_gap(self.tokens[slot], tokens), self._used_at[slot]),
            default=-1,
        )
        if (
            slot < 0
            or match_after_gap(self.tokens[slot], tokens) <= self.find_nearest(tokens)[1]
            or not self.memory.can_shift
        ):
            return None
        return self._taken(slot, self.scopes[slot]), self.apply_overflow(
            slot, tokens[:-1], move=True
        )

    def _shift(self, slot: int, start: int, end: int) -> bool:
        """Drop the tokens from `start` to `end` and move the later cells up. Return False when the
        memory does not support it or a busy slot holds cells that would move.
        """
        others = [other for other in range(len(self._cells)) if other != slot]
        holders = [other for other in others if self._shared(slot, other) > end]
        if not self.memory.can_shift or any(self._busy[other] for other in holders):
            return False
        first, length = (
            self.memory.first_position(slot) if self.memory.n_swa else 0,
            len(self.tokens[slot]),
        )
        if not window_survives_shift(first, start, end, length, self.memory.n_swa):
            return False
        for other in holders:  # an idle branch that shares the moving cells loses its end
            self._cut(other, end)
        held, cells = self.tokens[slot], self._cells[slot]
        kept = max((self._shared(slot, other) for other in others), default=0)
        try:
            self.memory.shift(slot, start, end, held[-1])
        except UserError:  # the whole memory was cleared
            for lost in range(len(self.tokens)):
                self.tokens[lost], self._cells[lost] = [], []
                self._prefixes.truncate(lost, 0)
            self._used = 0
            raise
        self._used -= end - max(start, kept)
        del held[start:end], cells[start:end]
        self._prefixes.truncate(slot, start)
        return True

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock
