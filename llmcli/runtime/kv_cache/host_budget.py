"""The budget of host memory for states of answers: a pure function of the memory of the machine."""

from dataclasses import dataclass

FREE_SHARE = 2  # half of the memory that is left over stays free for other programs


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory from which states of answers may take a part, in bytes.

    - `free_bytes`: what this machine can give without swapping. Pages of mapped files count as
      free. None: unknown.
    - `group_free_bytes`: what the limits of this process still allow: those of its control groups
      and of its address space. None: no limit.
    - `needed_bytes`: the part of both that the model needs nevertheless: weights that are mapped
      from the file and must stay in memory, and buffers that it has not filled yet.
    """

    free_bytes: int | None
    group_free_bytes: int | None = None
    needed_bytes: int = 0


def host_budget(memory: HostMemory) -> int:
    """Return how many bytes of host memory the states of answers may take together. The result is 0
    when the free memory is unknown, and never more than half of what the model leaves free.
    """
    if memory.free_bytes is None:
        return 0
    limits = [memory.free_bytes]
    if memory.group_free_bytes is not None:
        limits.append(memory.group_free_bytes)
    return max(0, min(limits) - memory.needed_bytes) // FREE_SHARE
