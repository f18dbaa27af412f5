"""The budget of host memory for states of answers, on this machine and beside an open model."""

from llmcli.hardware.host import available_memory
from llmcli.hardware.memory_limits import address_free_bytes, group_free_bytes
from llmcli.runtime.kv_cache.host_budget import HostMemory, host_budget
from quant.model_file.model_header import ModelHeader


def state_budget(header: ModelHeader, held_bytes: int = 0) -> int:
    """Return how many bytes of host memory the states of answers may take, after the model with
    this header was opened. `held_bytes`: bytes that such states take already.
    """
    limits = [limit for limit in (group_free_bytes(), address_free_bytes()) if limit is not None]
    free = available_memory()
    return host_budget(
        HostMemory(
            None if free is None else free + held_bytes,
            min(limits) + held_bytes if limits else None,
            # the pages of the mapped weights count as free, but must stay in memory
            header.tensor_bytes,
        )
    )
