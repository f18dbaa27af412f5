"""Records which slots (llama.cpp sequence ids) are busy, and which conversation turn the cells of
an idle slot belong to.
"""


class SlotTable:
    """The state of every slot (llama.cpp sequence id) except its cells. A slot is busy while an
    answer runs in it.

    - `scopes`: the scope of each slot, usually a client. Slots of different scopes share no cells.
    - `turns`: for each idle slot, the number of the conversation turn whose text it holds.
    - `last_used`: for each slot, when it was last claimed or released, counted in such events.
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
        """Return the slot that was claimed or released last."""
        return max(range(len(self.last_used)), key=self.last_used.__getitem__)

    def claim(self, slot: int, scope: str) -> int:
        """Mark a slot as busy, and return its number."""
        self.is_busy[slot], self.scopes[slot] = True, scope
        self._touch(slot)
        return slot

    def release(self, slot: int, turn: int) -> None:
        """Mark a slot as idle. `turn`: the number of the conversation turn whose text it holds."""
        self.is_busy[slot], self.turns[slot] = False, turn
        self._touch(slot)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self.last_used[slot] = self._clock
