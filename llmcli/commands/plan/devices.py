"""The part of `llmcli plan` about devices: which layers are where, and how many bytes they take."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmcli.commands.plan.receipt import format_ranges

if TYPE_CHECKING:
    from llmcli.planning.placement.device_shares import DeviceShare
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from llmcli.runtime.binding.placement.model_placement import ModelPlacement
    from llmcli.ui import UI


def build_document(
    placement: "ModelPlacement", context: "ContextOptions", shares: "Sequence[DeviceShare]"
) -> dict[str, Any]:
    """Return the object `placement` of `plan --json`. -1 layers are all layers."""
    return {
        "gpu_layers": placement.gpu_layers,
        "cpu_moe_layers": placement.cpu_moe_layers,
        "split_mode": placement.split_mode,
        "main_gpu": placement.main_gpu,
        "tensor_split": list(placement.tensor_split),
        "tensor_overrides": [asdict(override) for override in placement.tensor_overrides],
        "kv_offload": context.offload_kqv,
        "load_mode": placement.load_mode,
        "devices": [{**asdict(share), "layers": list(share.layers)} for share in shares],
    }


def print_shares(placement: "ModelPlacement", shares: "Sequence[DeviceShare]", ui: "UI") -> None:
    """Print a table of what each device holds. Print nothing if there is only the host."""
    from llmcli.units import format_size

    if len(shares) < 2:
        return
    ui.text()
    columns = ("device", "layers", "weights", "experts", "overridden", "KV cache", "compute up to")
    rows = []
    for share in shares:
        layers = format_ranges(list(share.layers))
        sizes = (
            share.layer_bytes,
            share.expert_bytes,
            share.override_bytes,
            share.kv_bytes,
            share.compute_bytes,
        )
        output = " + output" if layers and share.has_output else "output" * share.has_output
        rows.append((share.device, layers + output, *map(format_size, sizes)))
    ui.table(columns, rows, right=columns[2:])
    if placement.split_mode in ("row", "tensor"):
        ui.text(f"-sm {placement.split_mode} divides the matrices of each layer between devices")
