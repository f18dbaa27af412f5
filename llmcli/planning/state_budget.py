"""The budget of host memory for states of answers, on this machine and beside an open model."""

from llmcli.hardware.host import available_memory
from llmcli.hardware.memory_limits import address_free_bytes, group_free_bytes
from llmcli.runtime.kv_cache.host_budget import FREE_SHARE, HostMemory, host_budget


def state_budget(mapped_bytes: int, held_bytes: int = 0) -> int:
    """Return how many bytes of host memory the states of answers may take, after a model was opened.

    - `mapped_bytes`: weights that are read from the mapped file. Their pages count as free, but must
      stay in memory. Weights elsewhere are already missing from the free memory.
    - `held_bytes`: bytes that such states take already.
    """
    free, group, addresses = available_memory(), group_free_bytes(), address_free_bytes()
    budget = host_budget(
        HostMemory(
            None if free is None else free + held_bytes,
            None if group is None else group + held_bytes,
            mapped_bytes,
        )
    )
    # the mapping already takes its part of the address space
    return budget if addresses is None else min(budget, (addresses + held_bytes) // FREE_SHARE)
