"""Which parts of a model are on which device, and how many bytes they take: for `llmcli plan`."""

from dataclasses import dataclass

from llmcli.planning.machine import Machine
from llmcli.planning.placement.plan_placement import placed_layout, planned_machine
from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer
from llmcli.planning.prediction.memory_prediction import HOST, distribute, predict_memory
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What a device holds.

    - `layers`: the numbers of its layers. `has_output`: whether it also has the output matrix.
    - `layer_bytes`: weights without experts, with the embeddings and the output. `expert_bytes`:
      experts. `override_bytes`: tensors that --override-tensor has put here.
    - `kv_bytes`: KV cache. `compute_bytes`: an upper bound of the buffers of a pass.
    """

    device: str
    layers: tuple[int, ...]
    has_output: bool
    layer_bytes: int
    expert_bytes: int
    override_bytes: int
    kv_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return all bytes together."""
        weights = self.layer_bytes + self.expert_bytes + self.override_bytes
        return weights + self.kv_bytes + self.compute_bytes


def share_devices(
    header: ModelHeader,
    options: RunOptions,
    placement: ModelPlacement,
    context: ContextOptions,
    machine: Machine,
) -> tuple[DeviceShare, ...]:
    """Return what the host and then each device holds. `placement`: the chosen one. With -sm row and
    tensor, the matrices of a layer are divided, and the shares are those of whole layers.
    """
    machine = planned_machine(options, machine)
    layout = placed_layout(header, options, machine)
    n_layers, n_devices = len(layout.layers), len(machine.devices)
    free = [device.free_bytes for device in machine.devices]
    distribution = distribute(placement, n_layers, free)
    cache = cache_bytes_by_layer(header, context) or (0,) * n_layers
    memory = predict_memory(layout, cache, context, distribution, n_devices)
    pinned = {place: weights.nbytes for place, weights in layout.pinned}
    shares = []
    for place, part in zip((HOST, *range(n_devices)), memory, strict=True):
        experts = sum(
            layer.experts
            for number, layer in enumerate(layout.layers)
            if place
            == (HOST if distribution.has_host_experts[number] else distribution.places[number])
        )
        override = pinned.get(place, 0)
        shares.append(
            DeviceShare(
                HOST_DEVICE if place == HOST else machine.devices[place].name,
                tuple(n for n in range(n_layers) if distribution.places[n] == place),
                distribution.places[-1] == place,
                part.weights - experts - override,
                experts,
                override,
                part.kv,
                part.compute,
            )
        )
    return tuple(shares)
