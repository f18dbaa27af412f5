"""The memory that a model will take in a process of its own, predicted before its weights are
loaded. A server of several models admits them by it.
"""

from dataclasses import asdict, dataclass
from typing import Any

from llmcli.catalog.fetch import FetchedModel
from llmcli.errors import UserError
from llmcli.planning.dry_runs.memory_plan import MemoryPlan, open_memory_planner
from llmcli.planning.dry_runs.nearest_fit import GROWTH_BYTES, open_draft_memory
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.runtime.engine import prefill_context
from quant.model_file import load_checks


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The bytes of a model's process on the host.

    - `n_ctx`: the tokens of the context.
    - `weights`, `kv`, `buffers`: bytes of the weights, of the KV caches, and of computing and
      output, with those of a draft model.
    - `process`: the interpreter with its libraries, and what requests take.
    - `states`: bytes that are set aside for states of answers outside of the cache.
    """

    n_ctx: int
    weights: int
    kv: int
    buffers: int
    process: int
    states: int

    @property
    def needed_bytes(self) -> int:
        """The bytes without which the model cannot run."""
        return self.weights + self.kv + self.buffers + self.process

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, which can be sent to another process."""
        return asdict(self)


def predict_run(model: FetchedModel, plan: RunPlan) -> PlannedMemory:
    """Return the memory of a planned run. Raises UserError if llama.cpp cannot predict it."""
    load_checks.check_loadable(plan.header)
    with (
        open_draft_memory(plan) as draft,
        open_memory_planner(plan.header, plan.context, plan.placement, draft) as planner,
    ):
        predicted = planner.memory_plan()
    host = predicted.devices[0]
    kv, compute = host.kv or 0, (host.repacked or 0) + (host.compute or 0) + host.output
    if plan.options.prefill_cells:
        reading = _reading_plan(plan).devices[0]
        kv += reading.kv or 0
        compute += (reading.compute or 0) + reading.output
    if predicted.overhead is None or host.weights is None:
        raise UserError(
            f"the memory of {model.name} cannot be predicted",
            hint=f"llmcli serve {model.name} serves it alone",
        )
    return PlannedMemory(
        n_ctx=predicted.n_ctx,
        weights=host.weights,
        kv=kv,
        buffers=compute,
        process=predicted.overhead + GROWTH_BYTES,
        states=kv,
    )


def _reading_plan(plan: RunPlan) -> MemoryPlan:
    """Return the plan of the separate context in which a server reads prompts."""
    options = prefill_context.prefill_options(plan.context, plan.options)
    with open_memory_planner(plan.header, options, plan.placement) as planner:
        return planner.memory_plan()
