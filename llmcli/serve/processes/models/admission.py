"""Which models are unloaded so that another one fits into memory: a pure function of the loaded
models.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that takes memory.

    - `nbytes`: the bytes that count for it.
    - `last_used`: when its last request ended or began; only the order matters.
    - `is_busy`: it has requests in flight. `is_pinned`: it is never unloaded.
    """

    name: str
    nbytes: int
    last_used: float
    is_busy: bool = False
    is_pinned: bool = False


def choose_unloads(
    residents: Collection[Resident], nbytes: int, limit_bytes: int
) -> list[Resident] | None:
    """Return the models to unload so that a model of `nbytes` fits below `limit_bytes` together
    with the rest, the first to unload first. Return None if it does not fit even alone with the
    pinned models.

    Idle models come before busy ones, which must be waited for, and then those whose last use is
    longest ago. No model is in the result without which the rest would fit, too.
    """
    free = limit_bytes - nbytes - sum(resident.nbytes for resident in residents)
    candidates = sorted(
        (resident for resident in residents if not resident.is_pinned),
        key=lambda resident: (resident.is_busy, resident.last_used),
    )
    chosen: list[Resident] = []
    for candidate in candidates:
        if free >= 0:
            break
        chosen.append(candidate)
        free += candidate.nbytes
    if free < 0:
        return None
    for resident in reversed(tuple(chosen)):  # keep what was used last
        if free >= resident.nbytes:
            chosen.remove(resident)
            free -= resident.nbytes
    return chosen
