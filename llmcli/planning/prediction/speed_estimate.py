"""Estimate how long a token takes on a machine, from the bytes that it reads on each device.

Decoding is bound by memory: the time of a token is that of reading the weights and the KV cache
once, each from the memory where it lies, except that attention on a CPU is slower. This estimate ranks placements; it is not a forecast of a
speed. scripts/laboratory/speeds.py compares it with measured speeds.
"""

from collections.abc import Sequence

from llmcli.planning.machine import Machine
from llmcli.planning.prediction.memory_prediction import HOST, LayerDistribution
from llmcli.planning.prediction.model_layout import ModelLayout

DISK_RATE = 1e9  # assumed bytes per second of reading weights that do not stay in memory
HOP_SECONDS = {"gpu": 20e-6, "igpu": 20e-6, "rpc": 500e-6}  # of passing activations to a device
CACHE_FILL = 0.5  # part of the cache that is read for a token, on average over a conversation
# Part of the memory bandwidth at which attention reads the cache on a CPU, where it is bound by
# arithmetic: 0.10 to 0.20 with two cores and models of 135M to 1.5B (scripts/laboratory/speeds.py).
HOST_CACHE_RATE = 0.15


def seconds_per_token(
    layout: ModelLayout,
    machine: Machine,
    distribution: LayerDistribution,
    cache_bytes: Sequence[int],
    missing_bytes: int = 0,
    kv_on_host: bool = False,
) -> float:
    """Return the estimated seconds for a token. `cache_bytes`: of the cache of each layer.
    `missing_bytes`: weights that do not fit into the host's memory. `kv_on_host`: the cache is on the
    host for all layers.
    """
    read = [0.0] * (len(machine.devices) + 1)
    host_cache = hops = 0.0
    last = HOST
    for index, layer in enumerate(layout.layers):
        place = distribution.places[index]
        expert_place = HOST if distribution.has_host_experts[index] else place
        read[place] += layer.dense
        read[expert_place] += layer.experts * layout.expert_share
        if kv_on_host or place == HOST:
            host_cache += CACHE_FILL * cache_bytes[index]
        else:
            read[place] += CACHE_FILL * cache_bytes[index]
        hops += _hop_seconds(machine, last, place)
        if layer.experts:
            hops += 2 * _hop_seconds(machine, place, expert_place)
        last = place
    for place, pinned in layout.pinned:
        read[place] += layout.read_bytes(pinned)
    output_place = distribution.places[-1]
    read[output_place] += layout.output
    hops += _hop_seconds(machine, last, output_place) + _hop_seconds(machine, output_place, HOST)
    seconds = (read[HOST] + host_cache / HOST_CACHE_RATE) / machine.host_rate + hops
    # of the weights on the host, a token needs the same part as of the missing ones
    host_bytes = max(1, _host_weights(layout, distribution))
    seconds += missing_bytes * min(1.0, read[HOST] / host_bytes) / DISK_RATE
    for device, nbytes in zip(machine.devices, read[: len(machine.devices)], strict=True):
        seconds += nbytes / device.rate
    return seconds


def _host_weights(layout: ModelLayout, distribution: LayerDistribution) -> int:
    """Return the bytes of layers on the host."""
    pinned = sum(weights.nbytes for place, weights in layout.pinned if place == HOST)
    return pinned + sum(
        (layer.dense if place == HOST else 0) + (layer.experts if on_host else 0)
        for layer, place, on_host in zip(
            layout.layers, distribution.places, distribution.has_host_experts, strict=False
        )
    )


def _hop_seconds(machine: Machine, start: int, end: int) -> float:
    """Return the seconds for passing the values of a token from a place to another one."""
    if start == end:
        return 0.0
    kinds = [machine.devices[place].kind for place in (start, end) if place != HOST]
    return max(HOP_SECONDS[kind] for kind in kinds)
