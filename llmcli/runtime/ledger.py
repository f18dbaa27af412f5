"""Which KV cells hold which tokens: matching prefixes, sharing, cutting, forgetting.

One unified pool of cells; a slot is a llama.cpp sequence id. A finished answer's cells stay under its
slot until somebody needs the room, so the next turn of a chat finds its prefix here. It asks the memory
what it can do: a sliding window that has moved on, or recurrent state, cannot be cut back freely.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmcli.errors import UserError
from llmcli.runtime.binding.positions import window_moves

ANCHOR = 16  # tokens that must agree for a text to be found again behind a gap
TRIED = 32  # places where they agree: a text that turns in circles has many


class Memory(Protocol):
    """What the ledger asks of a context (llama_memory_* of llama.h)."""

    n_ctx: int
    n_seq_max: int
    n_swa: int
    recurrent: bool

    @property
    def can_shift(self) -> bool: ...

    def trim(self, sequence: int, keep: int) -> bool: ...

    def copy(self, source: int, target: int, start: int, end: int) -> None: ...

    def shift(self, sequence: int, start: int, end: int, last: int) -> None: ...

    def first(self, sequence: int) -> int: ...

    def last(self, sequence: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Occupied:
    """Whose cells are where. `latest`: for each token of the slot used last, whether others hold its cell as well;
    `others`: cells that this slot does not hold."""

    latest: tuple[bool, ...]
    others: int
    free: int


class Ledger:
    """The map of cells: per slot the tokens held and the cell each one lies in."""

    def __init__(self, memory: Memory, keeps: bool = True) -> None:
        """`keeps` False: an answer begins in an empty pool, and none is forgotten while others go on. llama.cpp fills
        holes, and attention adds up in the order of cells: sums round otherwise where that is not the tokens' own."""
        self.memory, self.keeps = memory, keeps
        count = memory.n_seq_max
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self._cells: list[list[int]] = [[] for _ in range(count)]
        self._busy = [False] * count
        self._used_at = [0] * count
        self._turns = [0] * count
        self._clock = 0
        self._next_cell = 0
        self._used = 0

    @property
    def size(self) -> int:
        """Cells in the pool."""
        return self.memory.n_ctx

    @property
    def used(self) -> int:
        """Cells that hold a token; one shared by several slots counts once."""
        return self._used

    @property
    def forks(self) -> bool:
        """Whether slots may share cells and part anywhere: a shared cell of a window never expires, and
        recurrent state can only be copied at its end."""
        return not self.memory.recurrent and (not self.memory.n_swa or self.size <= self.memory.n_swa)

    def occupied(self) -> Occupied:
        """The pool as the slot used last shares it with the others."""
        latest = max(range(len(self._cells)), key=self._used_at.__getitem__)
        holders = Counter(cell for cells in self._cells for cell in cells)
        mine = tuple(holders[cell] > 1 for cell in self._cells[latest])
        return Occupied(mine, len(holders) - len(mine), self.size - len(holders))

    def place(
        self, tokens: tuple[int, ...], path: frozenset[int] = frozenset(), move: bool = False
    ) -> tuple[int, int] | None:
        """Claim a slot for a prompt: (slot, tokens already there), or None while every slot is busy.

        At least the last token is left to compute, for its logits. The slot with the longest common prefix is taken
        over when it is idle and is continued or holds a turn of the prompt's own `path`, which this one spells
        otherwise; in all other cases its cells are shared, and what it holds besides stays. `move`: cells of such a
        slot behind something that the prompt leaves out may move up, as in `adapt`.
        """
        idle = [slot for slot, busy in enumerate(self._busy) if not busy]
        if not idle:
            return None
        if not self.keeps and len(idle) == len(self._busy):
            self.forget_idle()
        if move and (moved := self._place_moved(tokens, path, idle)):
            return moved
        lengths = [min(_common(held, tokens), len(tokens) - 1) for held in self.tokens]
        best = max(range(len(lengths)), key=lambda slot: (lengths[slot], not self._busy[slot]))
        target = self._oldest(idle)
        # An idle conversation is taken over where it is simply continued, or where its turn to be forgotten has come.
        continued = lengths[best] == len(self.tokens[best]) or self._turns[best] in path
        take_over = not self._busy[best] and (continued or target == best or not self.forks)
        if take_over or not self.forks or not lengths[best]:
            slot = best if take_over else target
            reused = self._cut(slot, min(lengths[slot], len(tokens) - 1))
        else:
            slot, reused = target, lengths[best]
            self._cut(slot, 0)
            self._share(best, slot, 0, reused)
        self._busy[slot] = True
        self._touch(slot)
        return slot, reused

    @property
    def latest(self) -> list[int]:
        """The tokens of the slot used last."""
        return self.tokens[max(range(len(self.tokens)), key=self._used_at.__getitem__)]

    def nearest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The slot that holds most of the beginning of these tokens, and how many; of equals the one used last."""
        lengths = [_common(mine, tokens) for mine in self.tokens]
        slot = max(range(len(lengths)), key=lambda slot: (lengths[slot], self._used_at[slot]))
        return slot, lengths[slot]

    def adopt(self, tokens: Sequence[int], put: Callable[[int], bool], turn: int) -> bool:
        """Let an idle slot hold tokens whose cells `put` brings from elsewhere; False where it does not, or no slot
        is idle or too few cells are free: then none holds them."""
        if not self.idle:
            return False
        slot = self.claim()
        good = self.make_room(len(tokens)) and put(slot)
        if good and self.memory.last(slot) == len(tokens) - 1:
            self.append(slot, list(tokens))
        else:
            emptied = self.memory.trim(slot, 0)
            assert emptied, "a memory that cannot even be emptied"
            good = False
        self.release(slot, turn)
        return good

    def held(self, slots: Sequence[int]) -> int:
        """Cells that these slots hold; one that several of them share counts once."""
        return sum(
            len(self._cells[slot]) - max((self._shared(slot, other) for other in slots[:at]), default=0)
            for at, slot in enumerate(slots)
        )

    @property
    def idle(self) -> int:
        """How many slots nobody is using."""
        return self._busy.count(False)

    @property
    def in_use(self) -> list[int]:
        """The slots of answers that are being made."""
        return [slot for slot, busy in enumerate(self._busy) if busy]

    def claim(self) -> int:
        """Take an idle slot and empty it: one that holds nothing, else the longest unused."""
        slot = self._oldest([slot for slot, busy in enumerate(self._busy) if not busy])
        self._cut(slot, 0)
        self._busy[slot] = True
        self._touch(slot)
        return slot

    def append(self, slot: int, tokens: list[int]) -> None:
        """Record tokens that a forward pass has just put into the cache."""
        if len(tokens) == 1:  # of nearly every pass: 6 µs behind one instead of 16
            self.tokens[slot].append(tokens[0])
            self._cells[slot].append(self._next_cell)
        else:
            self.tokens[slot] += tokens
            self._cells[slot] += range(self._next_cell, self._next_cell + len(tokens))
        self._next_cell += len(tokens)
        self._used += len(tokens)

    def fork(self, source: int, target: int) -> None:
        """Let `target` hold what `source` holds: cells that both have stay, the others' owners change."""
        common = self._shared(source, target)
        self._cut(target, common)
        assert len(self.tokens[target]) == common, "a memory that cannot be forked"
        self._share(source, target, common, len(self.tokens[source]))

    def adapt(self, slot: int, tokens: Sequence[int], move: bool) -> int:
        """Make a slot hold a beginning of `tokens`, as much as it can; returns how many of them it holds.

        With `move` the cells behind a piece that `tokens` leave out move up, where the memory can do that and no other
        slot holds them. They stay what they became with that piece before them: a text computed anew differs.
        """
        held = self.tokens[slot]
        at = _common(held, tokens)
        while move and (gap := _gap(held, tokens, at)) and self._shift(slot, at, at + gap):
            at += _common(held[at:], tokens[at:])
        return self._cut(slot, at)

    def settle(self, slots: list[int], tokens: list[int]) -> int:
        """Keep the slot that shares most with `tokens`, cut to what it shares; the others are emptied and idle."""
        kept = max(slots, key=lambda slot: _common(self.tokens[slot], tokens))
        self._cut(kept, _common(self.tokens[kept], tokens))
        for slot in slots:
            if slot != kept:
                self._cut(slot, 0)
                self.release(slot)
        return kept

    def trim(self, slot: int, keep: int) -> int:
        """Cut a slot back to `keep` tokens; returns what is left (0 where the memory cannot be cut there)."""
        return self._cut(slot, keep)

    def restore(self, slot: int) -> None:
        """After an interrupted pass: drop cells beyond what is recorded here."""
        keep = len(self.tokens[slot])
        if not self.memory.trim(slot, keep) or not self._window_holds(slot, keep):
            self._cut(slot, 0)

    def release(self, slot: int, turn: int = 0) -> None:
        """The answer is over; its cells stay for whoever continues it, as those of that turn of a conversation."""
        self._busy[slot], self._turns[slot] = False, turn
        self._touch(slot)

    def make_room(self, cells: int) -> bool:
        """Forget idle slots, longest unused first, until `cells` are free; False when that is not enough."""
        while self.size - self.used < cells:
            if not self.keeps:
                return False
            idle = [slot for slot, busy in enumerate(self._busy) if not busy and self.tokens[slot]]
            if not idle:
                return False
            self._cut(min(idle, key=self._used_at.__getitem__), 0)
        return True

    def forget_idle(self) -> bool:
        """Drop every idle slot's cells; whether there were any."""
        idle = [slot for slot, busy in enumerate(self._busy) if not busy and self.tokens[slot]]
        for slot in idle:
            self._cut(slot, 0)
        return bool(idle)

    def check(self) -> None:
        """Compare this map with llama.cpp's own positions; a difference is a bug and crashes."""
        for slot, held in enumerate(self.tokens):
            assert len(held) == len(self._cells[slot])
            assert self.memory.last(slot) == len(held) - 1, (slot, self.memory.last(slot), len(held))
        assert self.used == len({cell for cells in self._cells for cell in cells}), self.used
        assert self.used <= self.size, (self.used, self.size)

    def _oldest(self, idle: list[int]) -> int:
        """The slot to fill next: one that holds nothing, else the longest unused."""
        return min(idle, key=lambda slot: (bool(self.tokens[slot]), self._used_at[slot]))

    def _place_moved(self, tokens: tuple[int, ...], path: frozenset[int], idle: list[int]) -> tuple[int, int] | None:
        """An idle slot of the same conversation that holds more of a prompt with a gap closed than any as it is."""
        own = [slot for slot in idle if not path or self._turns[slot] in path]
        slot = max(own, key=lambda slot: (_reach(self.tokens[slot], tokens), self._used_at[slot]), default=-1)
        if slot < 0 or _reach(self.tokens[slot], tokens) <= self.nearest(tokens)[1] or not self.memory.can_shift:
            return None
        self._busy[slot] = True
        self._touch(slot)
        return slot, self.adapt(slot, tokens[:-1], move=True)

    def _shift(self, slot: int, start: int, end: int) -> bool:
        """Give up the tokens from `start` to `end` and move those behind up; False where that cannot be, or others are
        using what would move."""
        others = [other for other in range(len(self._cells)) if other != slot]
        holders = [other for other in others if self._shared(slot, other) > end]
        if not self.memory.can_shift or any(self._busy[other] for other in holders):
            return False
        first, length = self.memory.first(slot) if self.memory.n_swa else 0, len(self.tokens[slot])
        if not window_moves(first, start, end, length, self.memory.n_swa):
            return False
        for other in holders:  # an older branch, which nobody is using: it loses its end
            self._cut(other, end)
        held, cells = self.tokens[slot], self._cells[slot]
        shared = max((self._shared(slot, other) for other in others), default=0)
        try:
            self.memory.shift(slot, start, end, held[-1])
        except UserError:  # the whole memory is empty
            for lost in range(len(self.tokens)):
                self.tokens[lost], self._cells[lost] = [], []
            self._used = 0
            raise
        self._used -= end - max(start, shared)
        del held[start:end], cells[start:end]
        return True

    def _share(self, source: int, target: int, start: int, end: int) -> None:
        """Give `target`, which ends at `start`, the cells of `source` from there to `end`."""
        if start < end:
            self.memory.copy(source, target, start, end)
            self.tokens[target] += self.tokens[source][start:end]
            self._cells[target] += self._cells[source][start:end]

    def _held_elsewhere(self, slot: int, keep: int) -> int:
        """How many of the first cells of a slot, at least `keep`, would still be held if it let go of the others."""
        cell = self._cells[slot][keep]
        sharing = (
            self._shared(slot, other)
            for other, cells in enumerate(self._cells)
            if other != slot and keep < len(cells) and cells[keep] == cell
        )
        return max(sharing, default=keep)

    def _shared(self, one: int, other: int) -> int:
        """How many cells two slots share. Cells are only ever shared from the beginning, so bisection finds it."""
        mine, theirs = self._cells[one], self._cells[other]
        return bisect_left(range(min(len(mine), len(theirs))), True, key=lambda at: mine[at] != theirs[at])

    def _cut(self, slot: int, keep: int) -> int:
        held = self.tokens[slot]
        if keep < len(held) and not self._window_holds(slot, keep):
            keep = 0
        if keep < len(held) and not self.memory.trim(slot, keep):
            keep = 0
            emptied = self.memory.trim(slot, 0)
            assert emptied, "a memory that cannot even be emptied"
        if keep < len(held):
            self._used -= len(held) - self._held_elsewhere(slot, keep)
            del held[keep:]
            del self._cells[slot][keep:]
        return len(held)

    def _window_holds(self, slot: int, keep: int) -> bool:
        """Whether the token at position `keep` would still see its whole window."""
        first = self.memory.first(slot) if self.memory.n_swa and keep else 0
        return 0 <= first <= max(0, keep - self.memory.n_swa)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock


def _common(held: list[int], tokens: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(held, tokens, strict=False)):
        if one != other:
            return index
    return min(len(held), len(tokens))


def _gap(held: list[int], tokens: Sequence[int], at: int) -> int:
    """How many tokens of `held` to leave out at `at`, so that it goes on longest as `tokens` do there; 0 for none."""
    anchor = list(tokens[at : at + ANCHOR])
    if len(anchor) < ANCHOR:
        return 0
    first, places = anchor[0], []
    for place in range(at + 1, len(held) - ANCHOR + 1):
        if held[place] == first and held[place : place + ANCHOR] == anchor:
            places.append(place)
            if len(places) == TRIED:
                break
    return max(places, key=lambda place: _common(held[place:], tokens[at:]), default=at) - at


def _reach(held: list[int], tokens: Sequence[int]) -> int:
    """How many of `tokens` a slot would hold with one gap closed."""
    at = _common(held, tokens)
    gap = _gap(held, tokens, at)
    return at + _common(held[at + gap :], tokens[at:]) if gap else at
