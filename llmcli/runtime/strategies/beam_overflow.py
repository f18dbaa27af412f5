"""Beam search in a full context: drop the same tokens from all beams, and rebuild the KV cells of
the beams.

The cells of the best beam are moved or recomputed, like those of a single answer
(Ledger.apply_overflow). Every further beam shares the cells of the longest prefix that it has in
common with a rebuilt beam. The engine computes its remaining tokens, one beam after another.
"""

from dataclasses import dataclass

from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.context_overflow import OverflowPolicy, ShortenedText
from llmcli.runtime.requests.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RebuildTarget:
    """A beam's slot (llama.cpp sequence id), and the tokens whose cells it must have after the
    rebuild.
    """

    slot: int
    tokens: list[int]


class BeamRebuild:
    """Rebuilds the cells of the beams after tokens were dropped, one beam after another.

    The engine computes only `sequence.tokens` in `sequence.slot`. So the sequence is set to one
    beam at a time, and the engine's next passes compute the tokens of the beam that have no cells.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._pending: list[RebuildTarget] = []
        self._rebuilt: list[RebuildTarget] = []

    @property
    def is_busy(self) -> bool:
        """Return whether the cells of a beam are not yet all computed."""
        return bool(self._pending)

    def shorten(
        self,
        sequence: Sequence,
        overflow: OverflowPolicy,
        last_tokens: dict[int, int],
        max_cells: int,
    ) -> bool:
        """Drop tokens from all beams as `overflow` decides, and start to rebuild their cells.
        Return False, with nothing changed, when a beam has no tokens that may be dropped.

        `last_tokens`: the slot of each beam, best beam first, and the beam's last token, which has
        no cell yet. `max_cells`: the number of cells that all beams together may use.
        """
        texts = [[*self.ledger.tokens[slot], token] for slot, token in last_tokens.items()]
        # cells of the other beams that the best beam does not share
        n_unshared = self.ledger.count_cells(list(last_tokens)) + len(texts) - len(texts[0])
        results = [
            overflow.shorten(
                text, sequence.n_prompt, sequence.overflow_stats.turns, max_cells - n_unshared
            )
            for text in texts
        ]
        shortened_texts = [shortened for shortened in results if shortened]
        if len(shortened_texts) < len(texts):
            return False
        sequence.tokens = texts[0]
        sequence.shorten(shortened_texts[0])
        self._start_rebuild(sequence, overflow.can_move_cells, list(last_tokens), shortened_texts)
        return True

    def _start_rebuild(
        self,
        sequence: Sequence,
        can_move_cells: bool,
        slots: list[int],
        shortened_texts: list[ShortenedText],
    ) -> None:
        """Empty all slots except that of the best beam, whose cells are moved or cut. Then set the
        sequence to the first beam that has tokens to compute.

        `slots` and `shortened_texts`: one entry for each beam, best beam first.
        """
        self._pending = [
            RebuildTarget(slot, shortened.tokens[:-1])
            for slot, shortened in zip(slots, shortened_texts, strict=True)
        ]
        self._rebuilt = []
        for slot in (sequence.slot, *sequence.branch_slots):
            if slot != slots[0]:
                self.ledger.trim(slot, 0)
        self.ledger.apply_overflow(slots[0], self._pending[0].tokens, can_move_cells)
        self._continue_rebuild(sequence)

    def finish_beam(self, sequence: Sequence) -> None:
        """Continue with the next beam. Called after the engine has computed all cells of the beam
        to which the sequence is set.
        """
        self._rebuilt.append(self._pending.pop(0))
        self._continue_rebuild(sequence)

    def _continue_rebuild(self, sequence: Sequence) -> None:
        """Set the slot and the tokens of `sequence` to the first beam that has tokens without
        cells. Do nothing when all beams are rebuilt.
        """
        slots = {sequence.slot, *sequence.branch_slots}
        while self._pending:
            target = self._pending[0]
            if self._rebuilt:
                self._fork_longest_prefix(target)
            n_cached = len(self.ledger.tokens[target.slot])
            sequence.slot, sequence.branch_slots = target.slot, sorted(slots - {target.slot})
            sequence.tokens, sequence.n_computed = target.tokens, n_cached
            sequence.count_recomputed(len(target.tokens) - n_cached)
            if n_cached < len(target.tokens):
                return
            self._rebuilt.append(self._pending.pop(0))

    def _fork_longest_prefix(self, target: RebuildTarget) -> None:
        """Let a beam's slot share the cells of the longest prefix that it has in common with a
        rebuilt beam.
        """
        lengths = {beam.slot: common_prefix(beam.tokens, target.tokens) for beam in self._rebuilt}
        source = max(lengths, key=lengths.__getitem__)
        self.ledger.fork(source, target.slot)
        self.ledger.trim(target.slot, lengths[source])


def context_tokens(sequence: Sequence, answer: tuple[int, ...]) -> list[int]:
    """Return the prompt's tokens followed by `answer`, without the tokens that were dropped from a
    full context.
    """
    prompt, dropped = sequence.tokens[: sequence.n_prompt], sequence.overflow_stats.tokens
    # all dropped tokens belong to the prompt
    if dropped == len(sequence.request.tokens) - len(prompt):
        return [*prompt, *answer]
    text = [*sequence.request.tokens, *answer]
    n_kept = common_prefix(text, sequence.tokens)
    return [*text[:n_kept], *text[n_kept + dropped :]]
