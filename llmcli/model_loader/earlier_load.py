"""What an earlier plan or load of a model has found, so that another load need not find it again."""

from dataclasses import dataclass

from llmcli.hardware import host
from llmcli.model_loader.planned_memory import PlannedMemory
from llmcli.runtime.drafting.gain.pass_cost import MeasuredPasses


@dataclass(frozen=True, slots=True)
class EarlierLoad:
    """The findings for a file and settings that have not changed since.

    - `memory`: the plan, within whose limits the model is loaded.
    - `passes`: the passes that were measured; None: they are measured again.
    """

    memory: PlannedMemory
    passes: MeasuredPasses | None = None

    def surely_fits(self) -> bool:
        """Return whether the model needs no other check of its memory. Memory of GPUs is checked
        again, and so is that of the host if other programs have taken it.
        """
        free = host.available_memory(within_own_limit=False)
        return not self.memory.devices and free is not None and free >= self.memory.needed_bytes
