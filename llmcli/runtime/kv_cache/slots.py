"""Which slots are busy, and what idle slots hold."""


class SlotTable:
    """The state of every slot (llama.cpp sequence id), except for its cells.

    `scopes`: only slots of one scope share cells. `turns`: the turn of a conversation that an idle
    slot holds. `last_used`: when the slot was last claimed or released, on a clock that counts
    these events.
    """

    def __init__(self, count: int) -> None:
        self.is_busy = [False] * count
        self.last_used = [0] * count
        self.turns = [0] * count
        self.scopes = [""] * count
        self._clock = 0

    @property
    def n_idle(self) -> int:
        """Return the number of idle slots."""
        return self.is_busy.count(False)

    @property
    def idle(self) -> list[int]:
        """Return the idle slots."""
        return [slot for slot, busy in enumerate(self.is_busy) if not busy]

    @property
    def busy(self) -> list[int]:
        """Return the slots of running answers."""
        return [slot for slot, busy in enumerate(self.is_busy) if busy]

    @property
    def latest(self) -> int:
        """Return the most recently used slot."""
        return max(range(len(self.last_used)), key=self.last_used.__getitem__)

    def claim(self, slot: int, scope: str) -> int:
        """Mark a slot as busy and return it."""
        self.is_busy[slot], self.scopes[slot] = True, scope
        self._touch(slot)
        return slot

    def release(self, slot: int, turn: int) -> None:
        """Mark a slot as idle."""
        self.is_busy[slot], self.turns[slot] = False, turn
        self._touch(slot)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self.last_used[slot] = self._clock
