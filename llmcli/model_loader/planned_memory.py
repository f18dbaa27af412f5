"""The memory that a model will take in a process of its own, predicted before its weights are
loaded. A server of several models admits them by it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llmcli.catalog.fetch import FetchedModel
from llmcli.errors import UserError
from llmcli.planning.dry_runs.memory_plan import DeviceMemory, MemoryPlan, open_memory_planner
from llmcli.planning.dry_runs.nearest_fit import GROWTH_BYTES, open_draft_memory
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.planning.machine import DEVICE_RESERVE_BYTES, DEVICE_RESERVE_SHARE
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.devices import HOST_DEVICE, Device
from llmcli.runtime.engine import prefill_context
from quant.model_file import load_checks


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The bytes of a model's process on the host, and on the GPUs with a memory of their own.

    - `n_ctx`: the tokens of the context.
    - `weights`, `kv`, `buffers`: bytes of the weights, of the KV caches, and of computing and
      output, with those of a draft model.
    - `process`: the interpreter with its libraries, and what requests take.
    - `states`: bytes that are set aside for states of answers outside of the cache.
    - `devices`: bytes by GPU, with what its driver takes for the process. `devices_free`: the free
      bytes of all GPUs when they were planned.
    """

    n_ctx: int
    weights: int
    kv: int
    buffers: int
    process: int
    states: int
    devices: Mapping[str, int] = field(default_factory=dict)
    devices_free: Mapping[str, int] = field(default_factory=dict)

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
    shares = list(predicted.devices)
    if plan.options.prefill_cells:
        shares += [replace(share, weights=0, repacked=0) for share in _reading_plan(plan).devices]
    found = devices.list_devices()
    host, on_gpus = sum_by_device(shares, found)
    if predicted.overhead is None or host.weights is None:
        raise UserError(
            f"the memory of {model.name} cannot be predicted",
            hint=f"llmcli serve {model.name} serves it alone",
        )
    return PlannedMemory(
        n_ctx=predicted.n_ctx,
        weights=host.weights,
        kv=host.kv or 0,
        buffers=(host.repacked or 0) + (host.compute or 0) + host.output,
        process=predicted.overhead + GROWTH_BYTES,
        states=host.kv or 0,
        devices=on_gpus,
        devices_free={gpu.name: gpu.free_bytes for gpu in _own_memory_gpus(found)},
    )


def sum_by_device(
    shares: Sequence[DeviceMemory], found: Iterable[Device]
) -> tuple[DeviceMemory, dict[str, int]]:
    """Return the memory on the host, and the bytes on each GPU with a memory of its own. GPUs that
    use the memory of the host count there. `shares`: the memory of the contexts, those on the host
    and on each GPU. `found`: the devices of this machine.
    """
    gpus = {gpu.name: gpu for gpu in _own_memory_gpus(found)}
    host, sizes = DeviceMemory(HOST_DEVICE, 0, 0, 0, 0, 0, 0, None), dict.fromkeys(gpus, 0)
    for share in shares:
        if share.device in gpus:
            parts = (share.weights, share.repacked, share.kv, share.compute, share.output)
            sizes[share.device] += sum(part or 0 for part in parts)
        else:
            host = host.combined_with(share)
    return host, {
        name: nbytes + _driver_bytes(gpus[name], nbytes) for name, nbytes in sizes.items() if nbytes
    }


def _own_memory_gpus(found: Iterable[Device]) -> list[Device]:
    """Return the GPUs whose memory is not that of the host."""
    return [each for each in found if each.kind in devices.GPU_KINDS and not each.is_unified]


def _driver_bytes(gpu: Device, nbytes: int) -> int:
    """Return what counts for the driver's own memory of a process that takes `nbytes` on a GPU: half
    of what plans leave free there, and no more than there is.
    """
    reserve = min(DEVICE_RESERVE_BYTES, gpu.total_bytes // DEVICE_RESERVE_SHARE)
    return max(0, min(reserve // 2, gpu.free_bytes - nbytes))


def _reading_plan(plan: RunPlan) -> MemoryPlan:
    """Return the plan of the separate context in which a server reads prompts."""
    options = prefill_context.prefill_options(plan.context, plan.options)
    with open_memory_planner(plan.header, options, plan.placement) as planner:
        return planner.memory_plan()
