"""Checkpoints: copies of the part of a sequence's state that cannot be cut at its end.

Recurrent state exists only for the last token of a sequence, and a sliding window has dropped the
cells before it. A sequence of such a model can be set back to an earlier length only where this part
was copied. Attention without a window needs no copy: its cells are cut or shared.

Checkpoints are taken at the end of a prompt, where a turn continues, and before a draft. All of
them count in the budget of host memory (offload_store.py). A slot keeps at most MAX_PER_SLOT. When
it has more, the one is dropped whose neighbors are nearest, but never the first or the last.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MAX_PER_SLOT = 32


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state after the first `length` tokens of a slot, as llama.cpp wrote it."""

    length: int
    state: memoryview


class Checkpoints:
    """The checkpoints of all slots. Slots that share a prefix share its checkpoints."""

    def __init__(self, n_slots: int) -> None:
        self._of_slot: list[list[Checkpoint]] = [[] for _ in range(n_slots)]  # by length
        # how many slots and states in host memory have each checkpoint
        self._holders = Counter[Checkpoint]()
        self.nbytes = 0  # of all checkpoints; one that slots and states share counts once

    def __len__(self) -> int:
        return len(self._holders)

    def of_slot(self, slot: int) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of a slot, the shortest first."""
        return tuple(self._of_slot[slot])

    def nearest(self, slot: int, length: int) -> Checkpoint | None:
        """Return the checkpoint of a slot with the most tokens, at most `length`, or None."""
        return next(
            (found for found in reversed(self._of_slot[slot]) if found.length <= length), None
        )

    def add(self, slot: int, checkpoint: Checkpoint) -> None:
        """Add a checkpoint with more tokens than all others of a slot."""
        self._append(slot, checkpoint)
        held = self._of_slot[slot]
        if len(held) > MAX_PER_SLOT:
            nearest = min(
                range(1, len(held) - 1),
                key=lambda at: held[at + 1].length - held[at - 1].length,
            )
            self._remove(slot, nearest)

    def share(self, source: int, target: int, length: int) -> None:
        """Give an empty slot the checkpoints of another one, up to `length` tokens."""
        for checkpoint in self.of_slot(source):
            if checkpoint.length <= length:
                self._append(target, checkpoint)

    def set_slot(self, slot: int, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Replace the checkpoints of a slot."""
        self.cut(slot, -1)
        for checkpoint in checkpoints:
            self._append(slot, checkpoint)

    def cut(self, slot: int, length: int) -> None:
        """Drop the checkpoints of a slot that have more than `length` tokens."""
        held = self._of_slot[slot]
        while held and held[-1].length > length:
            self._remove(slot, len(held) - 1)

    def discard(self, slot: int, length: int) -> None:
        """Drop the checkpoint of a slot that has exactly `length` tokens, if there is one."""
        for at, checkpoint in enumerate(self._of_slot[slot]):
            if checkpoint.length == length:
                self._remove(slot, at)
                return

    @property
    def in_slots(self) -> set[Checkpoint]:
        """Return the checkpoints of all slots."""
        return {checkpoint for held in self._of_slot for checkpoint in held}

    def drop(self, last_used: Sequence[int]) -> bool:
        """Drop a checkpoint from all slots that have it: one whose slots were all used least
        recently, and of these the one with the fewest tokens. One that a state also needs stays,
        because its bytes would not be free. `last_used`: for each slot, when it was last used.
        Return whether there was one.
        """
        slots: dict[Checkpoint, list[int]] = {}
        for slot, held in enumerate(self._of_slot):
            for checkpoint in held:
                slots.setdefault(checkpoint, []).append(slot)
        free = [found for found in slots if len(slots[found]) == self._holders[found]]
        if not free:
            return False
        dropped = min(
            free, key=lambda found: (max(last_used[slot] for slot in slots[found]), found.length)
        )
        for slot in slots[dropped]:
            self._remove(slot, self._of_slot[slot].index(dropped))
        return True

    @contextmanager
    def keep(self, slot: int, length: int) -> Iterator[None]:
        """Keep the checkpoint of a slot with `length` tokens, if there is one, during a block that
        may drop others.
        """
        kept = tuple(found for found in self._of_slot[slot] if found.length == length)
        self.hold(kept)
        try:
            yield
        finally:
            self.release(kept)

    def hold(self, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Keep checkpoints until `release`, because a state in host memory needs them."""
        for checkpoint in checkpoints:
            self._count(checkpoint)

    def release(self, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Let go of checkpoints that `hold` kept. Those that no slot or state has are dropped."""
        for checkpoint in checkpoints:
            self._uncount(checkpoint)

    def _append(self, slot: int, checkpoint: Checkpoint) -> None:
        self._of_slot[slot].append(checkpoint)
        self._count(checkpoint)

    def _remove(self, slot: int, at: int) -> None:
        self._uncount(self._of_slot[slot].pop(at))

    def _count(self, checkpoint: Checkpoint) -> None:
        """Count one more holder of a checkpoint: a slot, or a state in host memory."""
        self._holders[checkpoint] += 1
        if self._holders[checkpoint] == 1:
            self.nbytes += len(checkpoint.state)

    def _uncount(self, checkpoint: Checkpoint) -> None:
        """Count one holder of a checkpoint less. Its bytes are free without any."""
        self._holders[checkpoint] -= 1
        if not self._holders[checkpoint]:
            del self._holders[checkpoint]
            self.nbytes -= len(checkpoint.state)
