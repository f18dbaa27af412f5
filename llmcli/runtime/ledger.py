"""Which KV cells hold which tokens: matching prefixes, sharing, cutting, forgetting.

One unified pool of cells; a slot is a llama.cpp sequence id. A finished answer's cells stay under
its slot until somebody needs the room, so the next turn of a chat finds its prefix here. It asks
the memory what it can do: a sliding window that has moved on, or recurrent state, cannot be cut
back freely.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from llmcli.errors import UserError
from llmcli.runtime.binding.positions import window_moves
from llmcli.runtime.cells import Cells
from llmcli.runtime.likeness import common, gap, reach
from llmcli.runtime.pool import Away, Memory, Occupied

PIECE = 64  # cells, the least that is forgotten at a time


class Ledger(Cells):
    """The map of cells, and who uses the slots: what is found, shared, taken out of the pool,
    forgotten.
    """

    def __init__(self, memory: Memory, keeps: bool = True) -> None:
        """`keeps` False: an answer begins in an empty pool, and none is forgotten while others go
        on. llama.cpp fills holes, and attention adds up in the order of cells: sums round otherwise
        where that is not the tokens' own.
        """
        super().__init__(memory)
        self.keeps, count = keeps, memory.n_seq_max
        self._busy = [False] * count
        self._used_at = [0] * count
        self._turns = [0] * count
        self.scopes = [""] * count  # who may share a slot's cells: whoever names the same
        self._clock = 0

    def occupied(self) -> Occupied:
        """The pool as the slot used last shares it with the others."""
        latest = max(range(len(self._cells)), key=self._used_at.__getitem__)
        holders = Counter(cell for cells in self._cells for cell in cells)
        mine = tuple(holders[cell] > 1 for cell in self._cells[latest])
        return Occupied(mine, len(holders) - len(mine), self.size - len(holders))

    def place(
        self,
        tokens: Sequence[int],
        path: frozenset[int] = frozenset(),
        move: bool = False,
        scope: str = "",
    ) -> tuple[int, int] | None:
        """Claim a slot for a prompt: (slot, tokens already there), or None while every slot is
        busy.

        At least the last token is left to compute, for its logits. The slot with the longest common
        prefix is taken over when it is idle and is continued or holds a turn of the prompt's own
        `path`, which this one spells otherwise; in all other cases its cells are shared, and what
        it holds besides stays. `move`: cells of such a slot behind something that the prompt leaves
        out may move up, as in `adapt`. Only slots of one `scope` are looked at.
        """
        idle = [slot for slot, busy in enumerate(self._busy) if not busy]
        if not idle:
            return None
        if not self.keeps and (
            len(idle) == len(self._busy) or all(self.tokens[slot] for slot in idle)
        ):
            if self.stuck:
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
        # An idle conversation is taken over where it is simply continued, or where its turn to be
        # forgotten has come.
        continued = reused == len(self.tokens[best])
        may_cut = self.keeps and (self._turns[best] in path or best == target or not self.forks)
        if best in idle and (continued or may_cut):
            reused = self._cut(best, reused)
            return self._taken(best, scope), reused
        self._cut(target, 0)
        self._share(best, target, 0, reused)
        return self._taken(target, scope), reused

    def _best(
        self, tokens: Sequence[int], path: frozenset[int], own: list[int], scope: str
    ) -> tuple[int, int]:
        """The slot that holds most of the beginning of a prompt, and how much."""
        if self.forks:
            reused, holders = self._match(tokens[:-1], scope)
        else:  # what a slot holds cannot be shared
            alike = {
                slot: self._usable(slot, common(self.tokens[slot], tokens[:-1])) for slot in own
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
        """How much of a beginning of that length can be kept of a slot that cannot be shared."""
        whole = length == len(self.tokens[slot])
        return (
            length
            if whole or (not self.memory.recurrent and self._window_holds(slot, length))
            else 0
        )

    def _taken(self, slot: int, scope: str) -> int:
        self._busy[slot], self.scopes[slot] = True, scope
        self._touch(slot)
        return slot

    def match(self, tokens: Sequence[int], scope: str = "") -> tuple[int, bool]:
        """How much of the beginning of a prompt a slot holds whose cells can be shared; whether one
        does in use.
        """
        length, holders = self._match(tokens[:-1], scope) if self.forks else (0, set[int]())
        return length, any(self._busy[slot] for slot in holders)

    def _match(self, tokens: Sequence[int], scope: str) -> tuple[int, set[int]]:
        """As the tree has it, once it has heard of what has come since it was asked last."""
        for slot, held in enumerate(self.tokens):
            if len(held) > self._prefixes.lengths[slot]:
                self._prefixes.grow(slot, held, self.scopes[slot])
        return self._prefixes.match(tokens, scope)

    @property
    def latest(self) -> list[int]:
        """The tokens of the slot used last."""
        return self.tokens[max(range(len(self.tokens)), key=self._used_at.__getitem__)]

    def nearest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The slot that holds most of the beginning of these tokens, and how many; of equals the
        one used last.
        """
        lengths = [common(mine, tokens) for mine in self.tokens]
        slot = max(range(len(lengths)), key=lambda slot: (lengths[slot], self._used_at[slot]))
        return slot, lengths[slot]

    def adopt(self, tokens: Sequence[int], put: Callable[[int], bool], turn: int) -> bool:
        """Let an idle slot hold tokens whose cells `put` brings from elsewhere; False where it does
        not, or no slot is idle or too few cells are free: then none holds them.
        """
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

    @property
    def idle(self) -> int:
        """How many slots nobody is using."""
        return self._busy.count(False)

    @property
    def in_use(self) -> list[int]:
        """The slots of answers that are being made."""
        return [slot for slot, busy in enumerate(self._busy) if busy]

    @property
    def tight(self) -> bool:
        """Whether a slot can only be claimed by cutting one, which leaves holes where nothing is to
        be forgotten.
        """
        return not self.keeps and all(
            held or busy for held, busy in zip(self.tokens, self._busy, strict=True)
        )

    def claim(self, scope: str = "") -> int:
        """Take an idle slot and empty it: one that holds nothing, else the longest unused."""
        slot = self._oldest([slot for slot, busy in enumerate(self._busy) if not busy])
        self._cut(slot, 0)
        return self._taken(slot, scope)

    @property
    def taken(self) -> int:
        """Cells of slots that are in use: what cannot be forgotten."""
        return self.held(self.in_use)

    @property
    def left(self) -> list[int]:
        """The idle slots that hold something, longest unused first."""
        idle = [slot for slot, busy in enumerate(self._busy) if not busy and self.tokens[slot]]
        return sorted(idle, key=self._used_at.__getitem__)

    def put_away(self, slot: int, whole: bool = False) -> Away:
        """Take out what no other slot in use holds as well, or all, and empty the slot."""
        others = [] if whole else [other for other in self.in_use if other != slot]
        start = max((self._shared(slot, other) for other in others), default=0)
        held = tuple(self.tokens[slot])
        state = self.memory.state(slot, start) if start < len(held) else memoryview(b"")
        away = Away(held, start, state)
        self._cut(slot, 0)
        return away

    def bring_back(self, slot: int, away: Away) -> bool:
        """Let an empty slot hold what was taken out; False where cells are short, or what others
        held is gone.
        """
        count, start = len(away.tokens), away.start
        if not self.make_room(count - start):
            return False
        found, holders = self._match(away.tokens[:start], self.scopes[slot])
        if found < start:
            return False
        source = min(holders) if start else -1
        if start == count:
            self._share(source, slot, 0, count)
            return True
        good = self.memory.put_state(slot, away.state, start, source)
        if not good or self.memory.last(slot) != count - 1:
            emptied = self.memory.trim(slot, 0)
            assert emptied, "a memory that cannot even be emptied"
            return False
        if start:
            self.tokens[slot] += away.tokens[:start]
            self._cells[slot] += self._cells[source][:start]
        self.append(slot, list(away.tokens[start:]))
        return True

    @property
    def stuck(self) -> bool:
        """Whether there are idle cells that can only be forgotten once no slot is in use."""
        return (
            not self.keeps
            and not self.memory.whole_states
            and bool(self.left)
            and bool(self.in_use)
        )

    def compact(self) -> None:
        """Forget what is idle, and lay out the others anew: each one's cells in the order of its
        tokens, no holes.
        """
        self.forget_idle()
        slots = [slot for slot, held in enumerate(self.tokens) if held]
        out = [(slot, self.put_away(slot)) for slot in reversed(slots)]
        for slot, away in reversed(out):
            back = self.bring_back(slot, away)
            assert back, "what was in the pool fits into it"

    def adapt(self, slot: int, tokens: Sequence[int], move: bool) -> int:
        """Make a slot hold a beginning of `tokens`, as much as it can; returns how many of them it
        holds.

        With `move` the cells behind a piece that `tokens` leave out move up, where the memory can
        do that and no other slot holds them. They stay what they became with that piece before
        them: a text computed anew differs.
        """
        held = self.tokens[slot]
        at = common(held, tokens)
        while move and (left_out := gap(held, tokens, at)) and self._shift(slot, at, at + left_out):
            at += common(held[at:], tokens[at:])
        return self._cut(slot, at)

    def settle(self, slots: list[int], tokens: list[int]) -> int:
        """Keep the slot that shares most with `tokens`, cut to what it shares; the others are
        emptied and idle.
        """
        kept = max(slots, key=lambda slot: common(self.tokens[slot], tokens))
        self._cut(kept, common(self.tokens[kept], tokens))
        for slot in slots:
            if slot != kept:
                self._cut(slot, 0)
                self.release(slot)
        return kept

    def release(self, slot: int, turn: int = 0) -> None:
        """The answer is over; its cells stay for whoever continues it, as those of that turn of a
        conversation.
        """
        self._busy[slot], self._turns[slot] = False, turn
        self._touch(slot)

    def make_room(self, cells: int) -> bool:
        """Forget idle slots, longest unused first and each from its end, until `cells` are free;
        False when that is not enough.
        """
        while (missing := cells - self.size + self.used) > 0:
            left = self.left
            if not left:
                return False
            if self.stuck:
                return False
            if self.keeps:
                slot = left[0]
                self._cut(slot, max(0, len(self.tokens[slot]) - max(missing, PIECE)))
            else:
                self.compact()
        return True

    def forget_idle(self) -> bool:
        """Drop every idle slot's cells; whether there were any."""
        left = self.left
        for slot in left:
            self._cut(slot, 0)
        return bool(left)

    def _oldest(self, idle: list[int]) -> int:
        """The slot to fill next: one that holds nothing, else nothing of its own, else the longest
        unused.
        """

        def worth(slot: int) -> tuple[int, int]:
            held = len(self.tokens[slot])
            known = self._prefixes.lengths[slot] == held
            return 0 if not held else 1 if known and self._prefixes.redundant(
                slot
            ) else 2, self._used_at[slot]

        return min(idle, key=worth)

    def _place_moved(
        self, tokens: Sequence[int], path: frozenset[int], idle: list[int]
    ) -> tuple[int, int] | None:
        """An idle slot of the same conversation that holds more of a prompt with a gap closed than
        any as it is.
        """
        own = [slot for slot in idle if not path or self._turns[slot] in path]
        slot = max(
            own,
            key=lambda slot: (reach(self.tokens[slot], tokens), self._used_at[slot]),
            default=-1,
        )
        if (
            slot < 0
            or reach(self.tokens[slot], tokens) <= self.nearest(tokens)[1]
            or not self.memory.can_shift
        ):
            return None
        return self._taken(slot, self.scopes[slot]), self.adapt(slot, tokens[:-1], move=True)

    def _shift(self, slot: int, start: int, end: int) -> bool:
        """Give up the tokens from `start` to `end` and move those behind up; False where that
        cannot be, or others are using what would move.
        """
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
        kept = max((self._shared(slot, other) for other in others), default=0)
        try:
            self.memory.shift(slot, start, end, held[-1])
        except UserError:  # the whole memory is empty
            for lost in range(len(self.tokens)):
                self.tokens[lost], self._cells[lost] = [], []
                self._prefixes.cut(lost, 0)
            self._used = 0
            raise
        self._used -= end - max(start, kept)
        del held[start:end], cells[start:end]
        self._prefixes.cut(slot, start)
        return True

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock
