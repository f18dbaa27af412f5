"""Prefill planning: decides how many rows of the next pass each prompt gets."""

from llmcli.runtime.engine.chunk_rows import PassLimits, choose_max_rows
from llmcli.runtime.engine.forward_pass import TILE_ROWS, ForwardPass, choose_prefill_rows
from llmcli.runtime.engine.overflow import OverflowHandler
from llmcli.runtime.engine.scheduler_state import MAX_FORCED_TOKENS, SchedulerState
from llmcli.runtime.requests.sequence import Sequence

OLDEST_PREFILL_SHARE = 4  # the oldest prompt gets 1/4 of the rows left for prompts


class PrefillPlanner:
    """Divides the rows of a pass between prompts. The prompt with the fewest tokens left gets rows
    first, but some rows are always reserved for the oldest prompt, so that short prompts do not
    starve it.
    """

    def __init__(self, state: SchedulerState, overflow: OverflowHandler) -> None:
        self.state, self.overflow = state, overflow
        self.row_seconds = 0.0  # moving average of seconds per row, over passes with many rows

    def record_pass(self, rows: int, seconds: float) -> bool:
        """Record the duration of a pass of `rows` rows. Return whether it was used for the average
        `row_seconds`; the duration of short passes says little about that of long ones.
        """
        seconds_per_row = seconds / rows
        # A pass of few rows counts only if it is fast: a slow one would make the next pass even
        # shorter.
        if rows < TILE_ROWS and (rows <= MAX_FORCED_TOKENS or seconds_per_row >= self.row_seconds):
            return False
        self.row_seconds += (
            (seconds_per_row - self.row_seconds) / 8 if self.row_seconds else seconds_per_row
        )
        return True

    def fill(self, plan: ForwardPass, prompts: list[Sequence], n_decoding: int) -> Sequence | None:
        """Add pieces of `prompts` to the pass `plan`. `n_decoding`: number of answers that are
        decoded at the same time. Return None, or the sequence for whose rows there are no cells.
        """
        context, ledger, schedule = self.state.context, self.state.ledger, self.state.schedule
        max_rows = self._max_rows(max(n_decoding, len(plan.tokens)))
        oldest = min(prompts, key=lambda prompt: (-prompt.request.priority, prompt.id))
        reserved_rows = (max_rows - len(plan.tokens)) // OLDEST_PREFILL_SHARE
        for sequence in prompts:
            self.overflow.apply(sequence, len(plan.tokens))
            if sequence.is_too_long:
                return sequence
            reserved_rows = 0 if sequence is oldest else reserved_rows
            n_left, n_rows = len(sequence.tokens) - sequence.n_computed, len(plan.tokens)
            count = min(
                n_left, max_rows - n_rows - reserved_rows, schedule.max_chunk_rows or n_left
            )
            if count <= 0:
                continue
            if not (schedule.max_rows or schedule.max_chunk_rows):
                count = choose_prefill_rows(
                    n_left, count, n_rows, context.n_batch, context.n_ubatch
                )
            count = min(
                count,
                self._max_outputs(plan, sequence, len(prompts)),
                sequence.tokens_to_checkpoint,
            )
            if not count:
                continue
            if not ledger.make_room(n_rows + count):
                count = ledger.size - ledger.used_cells - n_rows
            if count > 0:
                plan.add(sequence, count, context, ledger, len(self.state.running) == 1)
            elif (
                not plan.tokens
                or max(self.state.running.values(), key=self.state.preemption_rank) is not sequence
            ):
                return sequence
        return None

    def split(
        self, decoding: list[Sequence], prompts: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Return two lists: the prompts to compute in separate passes, and those to compute
        together with the next tokens of the answers `decoding`.
        """
        min_rows = self.state.schedule.min_prefill_rows
        if min_rows is None:
            rows = sum(map(_tokens_left, prompts))
            if decoding and self.can_offload_decodes(rows):
                return prompts, []
            return [], prompts
        separate = [prompt for prompt in prompts if _tokens_left(prompt) >= min_rows]
        return separate, [prompt for prompt in prompts if prompt not in separate]

    def can_offload_decodes(self, rows: int) -> bool:
        """Return whether the cells of running answers may be offloaded, and a pass of `rows` rows
        is long enough to make up for the time of offloading.
        """
        ledger, min_rows = self.state.ledger, self.state.schedule.min_offload_rows
        return (
            min_rows is not None
            and rows >= min_rows
            and ledger.can_fork
            and ledger.keeps_idle
            and ledger.memory.has_complete_states
        )

    def _max_outputs(self, plan: ForwardPass, sequence: Sequence, n_prompts: int) -> int:
        """Return the largest number of rows that a prompt may get in this pass, given the context's
        limit of rows with logits. If every row of the prompt needs logits (to score it), one such
        row is reserved for each other prompt.
        """
        context = self.state.context
        n_left = context.n_outputs - sum(plan.wants_logits)
        if n_left <= 0:
            return 0
        return max(1, n_left - n_prompts) if sequence.request.score_prompt else context.n_batch

    def _max_rows(self, n_decoding: int) -> int:
        """Return the largest number of rows of the next pass, in which or between which
        `n_decoding` answers are decoded. The pass should not take longer than
        `Schedule.max_gap_seconds`.
        """
        context, schedule = self.state.context, self.state.schedule
        return choose_max_rows(
            PassLimits(
                max_rows=min(context.n_batch, schedule.max_rows or context.n_batch),
                micro_batch_rows=context.n_ubatch,
                gap_seconds=schedule.max_gap_seconds,
                row_seconds=self.row_seconds,
                n_decoding=n_decoding,
                uses_tiles=bool(schedule.min_offload_rows),
            )
        )


def _tokens_left(sequence: Sequence) -> int:
    """Return the number of tokens of a sequence that are not computed yet."""
    return len(sequence.tokens) - sequence.n_computed
