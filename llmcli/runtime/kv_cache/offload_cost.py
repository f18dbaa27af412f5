"""Decides by measured cost whether to copy a state to host memory, whether to copy it back, and
whether to clear idle cells out of the pool. Pure functions.

All times are seconds, and 0 means "not measured". Before the first measurement, a state that fits
is stored, and cells stay in the pool.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateCost:
    """A state that may be copied between the pool and host memory.

    - `tokens`: tokens that need not be computed again when the state is used.
    - `nbytes`: bytes of the state.
    - `token_seconds`: time of computing a token. `byte_seconds`: time of copying a byte.
    - `reuse_chance`: the chance that a stored state is used later.
    """

    tokens: int
    nbytes: float
    token_seconds: float
    byte_seconds: float
    reuse_chance: float = 1.0


@dataclass(frozen=True, slots=True)
class IdleCellCost:
    """Idle cells that slow down the passes of another answer.

    - `cells`: their number. `nbytes`: bytes of their states.
    - `byte_seconds`: time of copying a byte.
    - `prefill_rows`, `decode_rows`: rows of the other answer that are still to be computed, in
      passes of many rows and of one row.
    - `prefill_cell_seconds`, `decode_cell_seconds`: time by which one idle cell prolongs one such
      row.
    """

    cells: int
    nbytes: float
    byte_seconds: float
    prefill_rows: int
    decode_rows: float
    prefill_cell_seconds: float
    decode_cell_seconds: float


def is_worth_storing(cost: StateCost) -> bool:
    """Return whether to copy a state to host memory: the computation that it may save takes longer
    than copying it there, and back if it is used.
    """
    saved = cost.reuse_chance * cost.tokens * cost.token_seconds
    copied = (1 + cost.reuse_chance) * cost.nbytes * cost.byte_seconds
    return not (saved and copied) or saved > copied


def is_worth_restoring(cost: StateCost) -> bool:
    """Return whether to copy a state back into the pool: the tokens that it saves take longer to
    compute than the whole state takes to copy.
    """
    saved, copied = cost.tokens * cost.token_seconds, cost.nbytes * cost.byte_seconds
    return cost.tokens > 0 and (not (saved and copied) or saved > copied)


def is_worth_clearing(cost: IdleCellCost) -> bool:
    """Return whether to clear idle cells out of the pool: they would prolong the rows of another
    answer by more than copying their states to host memory and back takes.
    """
    cell_seconds = (
        cost.prefill_rows * cost.prefill_cell_seconds + cost.decode_rows * cost.decode_cell_seconds
    )
    return cost.byte_seconds > 0 and (
        cost.cells * cell_seconds > 2 * cost.nbytes * cost.byte_seconds
    )
