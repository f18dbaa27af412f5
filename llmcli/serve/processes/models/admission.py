"""Which models are unloaded so that another one fits into memory: a pure function of the loaded
models.

Memory is counted on the host and on each GPU: a mapping of bytes by the name of the device.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmcli.runtime.binding.placement.devices import HOST_DEVICE

BytesByDevice = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that takes memory.

    - `nbytes`: the bytes that count for it on each device.
    - `last_used`: when its last request ended or began; only the order matters.
    - `is_busy`: it has requests in flight. `is_pinned`: it is never unloaded.
    """

    name: str
    nbytes: BytesByDevice
    last_used: float
    is_busy: bool = False
    is_pinned: bool = False


def choose_unloads(
    residents: Collection[Resident], nbytes: BytesByDevice, limits: BytesByDevice
) -> list[Resident] | None:
    """Return the models to unload so that a model of `nbytes` fits below `limits` on each of its
    devices together with the rest, the first to unload first. Return None if it does not fit even
    alone with the pinned models.

    Idle models come before busy ones, which must be waited for, and then those whose last use is
    longest ago. No model is in the result without which the rest would fit, too.
    """
    free = {
        device: limits[device] - size - sum_bytes(residents, device)
        for device, size in nbytes.items()
        if size and device in limits
    }
    candidates = sorted(
        (resident for resident in residents if not resident.is_pinned),
        key=lambda resident: (resident.is_busy, resident.last_used),
    )
    chosen: list[Resident] = []
    for candidate in candidates:
        if all(size >= 0 for size in free.values()):
            break
        chosen.append(candidate)
        for device in free:
            free[device] += candidate.nbytes.get(device, 0)
    if any(size < 0 for size in free.values()):
        return None
    for resident in reversed(tuple(chosen)):  # keep what was used last
        if all(size >= resident.nbytes.get(device, 0) for device, size in free.items()):
            chosen.remove(resident)
            for device in free:
                free[device] -= resident.nbytes.get(device, 0)
    return chosen


def sum_bytes(residents: Collection[Resident], device: str = HOST_DEVICE) -> int:
    """Return the bytes of all `residents` together on a device."""
    return sum(resident.nbytes.get(device, 0) for resident in residents)
