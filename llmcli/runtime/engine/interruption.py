"""Decides whether to interrupt a running pass after its clients have left. A pure function."""

from dataclasses import dataclass

# An interruption that comes too late aborts the next pass, which is then computed again. It is not
# worth this risk for a pass that ends as soon.
MIN_SAVED_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RunningPass:
    """The rows of a running pass that belong to cancelled sequences and to others, and the expected
    seconds of a row; 0 if unknown.
    """

    cancelled_rows: int
    other_rows: int
    row_seconds: float


def is_worth_interrupting(running: RunningPass) -> bool:
    """Return whether to interrupt a pass. The rows of all its sequences are dropped then, so those
    of others must be computed again. They may be at most half of the pass.
    """
    cancelled = running.cancelled_rows
    if not cancelled or cancelled < running.other_rows:
        return False
    return not running.row_seconds or cancelled * running.row_seconds >= MIN_SAVED_SECONDS
