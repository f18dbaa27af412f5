"""The budget of host memory for states of answers, on this machine and beside an open model."""

from llmcli.hardware.host import available_memory
from llmcli.hardware.memory_limits import group_free_bytes
from llmcli.runtime.kv_cache.host_budget import HostMemory, host_budget
from quant.model_file.model_header import ModelHeader


def state_budget(header: ModelHeader) -> int:
    """Return how many bytes of host memory the states of answers may take, after the model with
    this header was opened.
    """
    # the pages of the mapped weights count as free, but must stay in memory
    return host_budget(HostMemory(available_memory(), group_free_bytes(), header.tensor_bytes))
