"""Beams in a full context: the same tokens are dropped from all beams, and the cells of the beams
are rebuilt.

The cells of the best beam are treated like those of a single answer: moved or recomputed
(Ledger.apply_overflow). Each other beam then shares the longest common prefix with a rebuilt beam,
and the rest of it is computed, one beam after another.
"""

from dataclasses import dataclass

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.context_overflow import OverflowPolicy, ShortenedText
from llmcli.runtime.requests.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SharedStem:
    """A beam's slot, and the tokens that it must hold after the rebuild."""

    slot: int
    tokens: list[int]


class BranchRecompute:
    """Rebuilds the cells of beams one after another: `sequence` gets the slot and the tokens of a
    beam, and the engine then computes the tokens without cells.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._todo: list[SharedStem] = []
        self._done: list[SharedStem] = []

    @property
    def is_busy(self) -> bool:
        """Return whether cells of a beam are still to be computed."""
        return bool(self._todo)

    def shorten(
        self,
        sequence: Sequence,
        overflow: OverflowPolicy,
        last_tokens: dict[int, int],
        max_cells: int,
    ) -> bool:
        """Drop tokens from all beams. Return False when nothing may be dropped.

        `last_tokens`: the slot of each beam, best beam first, and the beam's last token, which has
        no cell yet. `max_cells`: cells that the beams may use.
        """
        texts = [[*self.ledger.tokens[slot], token] for slot, token in last_tokens.items()]
        others = (
            self.ledger.count_cells(list(last_tokens)) + len(texts) - len(texts[0])
        )  # cells that the best beam does not share
        shortened = [
            overflow.shorten(
                text, sequence.n_prompt, sequence.overflow_stats.turns, max_cells - others
            )
            for text in texts
        ]
        kept = [shorter for shorter in shortened if shorter]
        if len(kept) < len(texts):
            return False
        sequence.tokens = texts[0]
        sequence.shorten(kept[0])
        self._begin(sequence, overflow.can_move_cells, list(last_tokens), kept)
        return True

    def _begin(
        self, sequence: Sequence, move: bool, slots: list[int], stays: list[ShortenedText]
    ) -> None:
        self._todo = [
            SharedStem(slot, shorter.tokens[:-1])
            for slot, shorter in zip(slots, stays, strict=True)
        ]
        self._done = []
        for slot in (sequence.slot, *sequence.branch_slots):
            if slot != slots[0]:
                self.ledger.trim(slot, 0)
        self.ledger.apply_overflow(slots[0], self._todo[0].tokens, move)
        self._go_on(sequence)

    def finish_beam(self, sequence: Sequence) -> None:
        """Continue with the next beam, after the cells of the present one are computed."""
        self._done.append(self._todo.pop(0))
        self._go_on(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        """Set the sequence to the first beam that still has tokens to compute."""
        slots = {sequence.slot, *sequence.branch_slots}
        while self._todo:
            stem = self._todo[0]
            if self._done:
                self._take(stem)
            n_cached = len(self.ledger.tokens[stem.slot])
            sequence.slot, sequence.branch_slots = stem.slot, sorted(slots - {stem.slot})
            sequence.tokens, sequence.n_computed = stem.tokens, n_cached
            sequence.count_recomputed(len(stem.tokens) - n_cached)
            if n_cached < len(stem.tokens):
                return
            self._done.append(self._todo.pop(0))

    def _take(self, stem: SharedStem) -> None:
        """Give a beam's slot the cells of the longest prefix that it has in common with a rebuilt
        beam.
        """
        lengths = {done.slot: common_prefix(done.tokens, stem.tokens) for done in self._done}
        source = max(lengths, key=lengths.__getitem__)
        self.ledger.fork(source, stem.slot)
        self.ledger.trim(stem.slot, lengths[source])


def context_tokens(sequence: Sequence, answer: tuple[int, ...]) -> list[int]:
    """Return the tokens of the prompt and of `answer`, without those that were dropped from a full
    context.
    """
    prompt, dropped = sequence.tokens[: sequence.n_prompt], sequence.overflow_stats.tokens
    # all dropped tokens belong to the prompt
    if dropped == len(sequence.request.tokens) - len(prompt):
        return [*prompt, *answer]
    text = [*sequence.request.tokens, *answer]
    n_kept = common_prefix(text, sequence.tokens)
    return [*text[:n_kept], *text[n_kept + dropped :]]
