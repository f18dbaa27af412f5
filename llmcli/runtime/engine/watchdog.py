"""How long the engine's thread may work on one thing before it counts as stuck: a pure function of
the rows of a pass and of the measured time of a row.
"""

from dataclasses import dataclass

# What is not a pass takes less than this. So does a lost connection to an RPC worker, which
# llama.cpp notices after half a minute.
BASE_SECONDS = 120.0
# A pass may take longer than the average by this factor: a long context and other programs slow it
# down.
SLOWDOWN = 4.0
UNMEASURED_ROW_SECONDS = 4.0  # time of a row in the first pass, on a very slow machine


@dataclass(frozen=True, slots=True)
class WatchedWork:
    """What the engine's thread is doing: a pass of `rows` rows, or something else (0 rows).
    `row_seconds`: measured seconds of a row in passes of many rows; 0 before the first.
    """

    rows: int
    row_seconds: float


def limit_seconds(work: WatchedWork) -> float:
    """Return the seconds after which the engine's thread counts as stuck."""
    if not work.row_seconds:
        return BASE_SECONDS + work.rows * UNMEASURED_ROW_SECONDS
    return BASE_SECONDS + work.rows * SLOWDOWN * work.row_seconds
