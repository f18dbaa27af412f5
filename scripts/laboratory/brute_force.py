"""Find the best placement and context by trying all of them, to judge the choices of planning.

All numbers of layers on devices, of layers whose experts stay on the host, and of tokens of context
are tried; on two devices with every split, and on more devices in proportion to their memory.
"""

import itertools
from collections.abc import Iterator, Sequence

from llmcli.planning.placement.placement_search import (
    LEAST_TOKENS,
    MIN_TOKENS,
    PlacementRequest,
    PlacementSearch,
    PlannedPlacement,
)
from llmcli.planning.prediction.memory_prediction import split_for_counts
from llmcli.runtime.binding.placement.model_placement import ON_HOST, ModelPlacement


def best_plan(
    search: PlacementSearch, request: PlacementRequest, layer_step: int = 1, context_step: int = 512
) -> PlannedPlacement | None:
    """Return the plan with the highest score among those that fit, or None if none fits. Every
    `layer_step`-th number of layers and every `context_step`-th number of tokens is tried.
    """
    contexts = (
        [request.n_ctx]
        if request.n_ctx is not None
        else sorted(
            {*range(LEAST_TOKENS, request.wanted_tokens, context_step), request.wanted_tokens}
        )
    )
    best: PlannedPlacement | None = None
    for placement in placements(search, request, layer_step):
        for n_ctx in contexts:
            plan = search.evaluate(placement, n_ctx)
            if not plan.fits:
                break  # a longer context does not fit either
            is_short = n_ctx < min(MIN_TOKENS, contexts[-1])
            if best is None or (not is_short, plan.score) > (
                best.n_ctx >= min(MIN_TOKENS, contexts[-1]),
                best.score,
            ):
                best = plan
    return best


def placements(
    search: PlacementSearch, request: PlacementRequest, layer_step: int
) -> Iterator[ModelPlacement]:
    """Yield all placements that a request allows."""
    layout, devices = search.layout, search.machine.devices
    n_layers = len(layout.layers)
    if request.gpu_layers is not None or not devices:
        yield ModelPlacement(
            request.gpu_layers or 0,
            request.tensor_split,
            cpu_moe_layers=request.cpu_moe_layers or 0,
        )
        return
    yield ON_HOST
    layers = sorted({*range(0, n_layers + 2, layer_step), n_layers + 1} - {0})
    experts = [request.cpu_moe_layers or 0]
    if layout.has_experts and request.cpu_moe_layers is None:
        experts = sorted({*range(0, n_layers + 1, layer_step), n_layers})
    for n_moved, n_host in itertools.product(layers, experts):
        for split in _splits(search, request, n_moved):
            yield ModelPlacement(n_moved, split, cpu_moe_layers=n_host)


def _splits(
    search: PlacementSearch, request: PlacementRequest, n_moved: int
) -> Iterator[tuple[float, ...]]:
    """Yield the proportions in which devices may share `n_moved` layers."""
    devices = search.machine.devices
    if request.tensor_split or len(devices) == 1:
        yield request.tensor_split
        return
    if len(devices) == 2:
        least = [int(device.kind == "rpc") for device in devices]  # workers were asked for
        for first in range(least[0], n_moved + 1 - least[1]):
            yield split_for_counts((first, n_moved - first))
        return
    by_memory = sorted(range(len(devices)), key=lambda index: -devices[index].usable_bytes)
    for size in range(1, len(devices) + 1):
        used = sorted(by_memory[:size])
        yield _proportional([devices[index].usable_bytes for index in used], used, len(devices))


def _proportional(sizes: Sequence[int], used: Sequence[int], count: int) -> tuple[float, ...]:
    """Return proportions by memory for the devices `used` of `count` devices."""
    shares = [0.0] * count
    for index, size in zip(used, sizes, strict=True):
        shares[index] = float(size)
    return tuple(shares)
