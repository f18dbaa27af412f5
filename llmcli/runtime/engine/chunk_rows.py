"""Decides how many rows the next pass may have, by the measured time of a row. A pure function."""

from dataclasses import dataclass

from llmcli.runtime.engine.forward_pass import TILE_ROWS
from llmcli.runtime.engine.scheduler_state import MAX_FORCED_TOKENS

UNMEASURED_SHARE = 4  # before the first measurement, a pass beside answers has 1/4 micro-batch


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What limits the rows of a pass that computes prompts.

    - `max_rows`: the most rows that the context and the schedule allow. `micro_batch_rows`: rows of
      a micro-batch.
    - `gap_seconds`: how long the pass may delay the next tokens of answers; None: any time.
    - `row_seconds`: measured seconds of a row; 0 before the first measurement.
    - `n_decoding`: answers that are decoded in or between the passes.
    - `uses_tiles`: whether the passes of prompts must be long enough for the tiles of ggml's flash
      attention on a CPU.
    """

    max_rows: int
    micro_batch_rows: int
    gap_seconds: float | None
    row_seconds: float
    n_decoding: int
    uses_tiles: bool


def choose_max_rows(limits: PassLimits) -> int:
    """Return the largest number of rows of the next pass.

    Beside answers a pass is as long as the gap allows. Without them it has whole micro-batches, at
    least one, so that the logits do not depend on how fast the machine is; it is no longer than the
    gap where it has several, because only their ends can interrupt it on a GPU.
    """
    if limits.gap_seconds is None:
        return limits.max_rows
    micro_batch = limits.micro_batch_rows
    rows_in_gap = int(limits.gap_seconds / limits.row_seconds) if limits.row_seconds else 0
    if not limits.n_decoding:
        return min(limits.max_rows, micro_batch * max(1, rows_in_gap // micro_batch))
    if not limits.row_seconds:
        rows_in_gap = micro_batch // UNMEASURED_SHARE
    step = TILE_ROWS if rows_in_gap >= TILE_ROWS or limits.uses_tiles else MAX_FORCED_TOKENS
    # Round to the nearest multiple. Rounding down would leave passes too short for the tiles of
    # flash attention.
    nearest = (rows_in_gap + step // 2) // step * step
    return min(limits.max_rows, max(nearest, step, limits.n_decoding + MAX_FORCED_TOKENS))
