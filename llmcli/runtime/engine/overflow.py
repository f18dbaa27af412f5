"""Handles running sequences whose context is full."""

from llmcli.errors import UserError
from llmcli.runtime.engine.scheduler_state import SchedulerState
from llmcli.runtime.requests.context_overflow import OverflowPolicy
from llmcli.runtime.requests.sequence import Sequence


class OverflowHandler:
    """Drops tokens of sequences whose context is full, if their requests allow it
    (requests/context_overflow.py).
    """

    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def apply(self, sequence: Sequence, planned_rows: int) -> None:
        """If the context of a sequence is full and its request allows it, drop tokens. The cells of
        the remaining tokens are moved, or the tokens must be recomputed. `planned_rows`: rows that
        the next pass has already.

        Raises UserError when llama.cpp fails to move the cells; the cache is empty then.
        """
        if sequence.request.overflow is None:
            return
        try:
            if sequence.strategy.slots > 1:
                self._shorten_branches(sequence, planned_rows)
            elif sequence.is_too_long:
                self._shorten(sequence, sequence.request.overflow)
        except UserError:  # moving cells failed, and the whole memory is empty
            for running in self.state.running.values():
                n_cached = len(self.state.ledger.tokens[running.slot])
                running.n_computed = min(running.n_computed, n_cached)
            raise

    def _shorten(self, sequence: Sequence, overflow: OverflowPolicy) -> None:
        """Drop tokens from an answer without branches."""
        shortened = overflow.shorten(
            sequence.tokens,
            sequence.n_prompt,
            sequence.overflow_stats.turns,
            sequence.max_tokens,
        )
        if shortened is None:
            return
        sequence.shorten(shortened)
        sequence.strategy.on_context_shift(sequence)
        sequence.n_computed = self.state.ledger.apply_overflow(
            sequence.slot, sequence.tokens[:-1], overflow.can_move_cells
        )
        sequence.count_recomputed(len(sequence.tokens) - 1 - sequence.n_computed)

    def _shorten_branches(self, sequence: Sequence, planned_rows: int) -> None:
        """Free cells for the next tokens of all branches of a beam search, by evicting idle cells
        or dropping tokens of the branches. Nothing is done while other sequences run, because the
        scheduler can preempt these.
        """
        ledger, strategy = self.state.ledger, sequence.strategy
        if sequence.n_computed < len(sequence.tokens) or len(self.state.running) > 1:
            return
        n_rows = len(strategy.pending_rows())
        if n_rows and not ledger.make_room(planned_rows + n_rows):
            strategy.apply_overflow(sequence, ledger.size - planned_rows)
