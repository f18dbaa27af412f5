"""Beams in a full context: the same leaves all of them, and their cells are built again.

The cells of one are what an answer's alone would be: they move up, or are computed anew
(ledger.adapt). The others take from it what they share with it, and what each has by itself is
computed, one beam after the other.
"""

from dataclasses import dataclass

from llmcli.runtime.ledger import Ledger
from llmcli.runtime.overflow import Overflow, Shorter
from llmcli.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Stem:
    """What a beam's slot is to hold."""

    slot: int
    tokens: list[int]


class Regrowth:
    """Builds beams' cells again, through the engine: whatever `sequence` has not computed it
    computes next.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._todo: list[Stem] = []
        self._done: list[Stem] = []

    @property
    def busy(self) -> bool:
        """Whether a beam's cells are still to be computed."""
        return bool(self._todo)

    def shorten(
        self, sequence: Sequence, overflow: Overflow, heads: dict[int, int], cells: int
    ) -> bool:
        """Let go of what may leave; False where nothing may. `heads` has each beam's slot, the best
        one's first, and its last token, which is not computed. `cells` are all that the beams may
        have.
        """
        texts = [[*self.ledger.tokens[slot], token] for slot, token in heads.items()]
        others = (
            self.ledger.held(list(heads)) + len(texts) - len(texts[0])
        )  # cells that the best does not share
        made = [
            overflow.shorten(text, sequence.prompt, sequence.left.turns, cells - others)
            for text in texts
        ]
        stays = [shorter for shorter in made if shorter]
        if len(stays) < len(texts):
            return False
        sequence.tokens = texts[0]
        sequence.shorten(stays[0])
        self._begin(sequence, overflow.move, list(heads), stays)
        return True

    def _begin(
        self, sequence: Sequence, move: bool, slots: list[int], stays: list[Shorter]
    ) -> None:
        self._todo = [
            Stem(slot, shorter.tokens[:-1]) for slot, shorter in zip(slots, stays, strict=True)
        ]
        self._done = []
        for slot in (sequence.slot, *sequence.spare):
            if slot != slots[0]:
                self.ledger.trim(slot, 0)
        self.ledger.adapt(slots[0], self._todo[0].tokens, move)
        self._go_on(sequence)

    def grown(self, sequence: Sequence) -> None:
        """A beam's cells are there; on to the next."""
        self._done.append(self._todo.pop(0))
        self._go_on(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        """Leave to the engine the first beam that has something to compute."""
        slots = {sequence.slot, *sequence.spare}
        while self._todo:
            stem = self._todo[0]
            if self._done:
                self._take(stem)
            held = len(self.ledger.tokens[stem.slot])
            sequence.slot, sequence.spare = stem.slot, sorted(slots - {stem.slot})
            sequence.tokens, sequence.computed = stem.tokens, held
            sequence.recompute(len(stem.tokens) - held)
            if held < len(stem.tokens):
                return
            self._done.append(self._todo.pop(0))

    def _take(self, stem: Stem) -> None:
        """Share with the beam that has most of it."""
        shared = {done.slot: _common(done.tokens, stem.tokens) for done in self._done}
        source = max(shared, key=shared.__getitem__)
        self.ledger.fork(source, stem.slot)
        self.ledger.trim(stem.slot, shared[source])


def seen(sequence: Sequence, answer: tuple[int, ...]) -> list[int]:
    """What of a prompt and an answer stands in the context, where some may have left it."""
    prompt, left = sequence.tokens[: sequence.prompt], sequence.left.tokens
    if left == len(sequence.request.tokens) - len(prompt):  # of the prompt alone
        return [*prompt, *answer]
    whole = [*sequence.request.tokens, *answer]
    kept = _common(whole, sequence.tokens)
    return [*whole[:kept], *whole[kept + left :]]


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))
