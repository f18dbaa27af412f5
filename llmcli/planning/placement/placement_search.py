"""Choose where a model's layers go and how long its context is: the values of `-ngl auto`, of
`--n-cpu-moe auto`, of the split between devices, and of the default context.

The objective is tokens per second times tokens of context: half the speed is as bad as half the
context. Below MIN_TOKENS, the context is only shortened if nothing else fits. A model whose weights
do not fit into the host's memory is read from the disk again and again, which the objective counts.

What a token reads completely (attention, dense layers, the KV cache) gains most from a device per
byte, and experts least. So layers move to devices first without their experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmcli.planning.machine import Machine
from llmcli.planning.prediction.memory_prediction import (
    HOST,
    LayerDistribution,
    PredictedMemory,
    distribute,
    predict_memory,
    split_for_counts,
)
from llmcli.planning.prediction.model_layout import ModelLayout
from llmcli.planning.prediction.speed_estimate import seconds_per_token
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import ON_HOST, ModelPlacement

MIN_TOKENS = 4096  # a useful context, as in llama.cpp's fit (common/arg.cpp, --fit-ctx)
LEAST_TOKENS = 512
# bytes of the process besides the model: interpreter, vocabulary, graphs, prompts, answers
PROCESS_BYTES = 256 << 20
BALANCE_STEPS = 10  # halvings in the search for equally full devices


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a user asks for. None: to be chosen.

    - `gpu_layers`: number of layers on devices; negative for all. `cpu_moe_layers`: layers whose
      experts stay on the host; negative for all. `tensor_split`: the share of each device; empty: to
      be chosen.
    - `n_ctx`: tokens of context. `wanted_tokens`: the largest context to choose.
    - `must_offload`: put layers on devices if any fits, even if the host is faster.
    """

    wanted_tokens: int
    gpu_layers: int | None = None
    cpu_moe_layers: int | None = None
    tensor_split: tuple[float, ...] = ()
    n_ctx: int | None = None
    must_offload: bool = False


@dataclass(frozen=True, slots=True)
class PlannedPlacement:
    """A placement, its context, and what they take.

    - `memory`: of the host, and of each device.
    - `fits`: everything fits, so that the run reads nothing from the disk. `can_run`: what must stay
      in memory fits.
    """

    placement: ModelPlacement
    n_ctx: int
    memory: tuple[PredictedMemory, ...]
    fits: bool
    can_run: bool
    seconds_per_token: float

    @property
    def score(self) -> float:
        """Return the value of the objective; 0 if it cannot run."""
        return self.n_ctx / self.seconds_per_token if self.can_run else 0.0


class PlacementSearch:
    """The search for one model on one machine. `cache_bytes`: returns the bytes of the cache of each
    layer for a context; empty if unknown. `options`: of the context, but for its size.
    """

    def __init__(
        self,
        layout: ModelLayout,
        machine: Machine,
        options: ContextOptions,
        cache_bytes: Callable[[ContextOptions], Sequence[int]],
    ) -> None:
        self.layout, self.machine, self.options = layout, machine, options
        self._cache_bytes = cache_bytes
        self._free = tuple(device.free_bytes for device in machine.devices)

    def choose(self, request: PlacementRequest) -> PlannedPlacement:
        """Return the best placement and context for a request. If nothing fits, the result is the
        shortest context, and its `can_run` is False.
        """
        if request.n_ctx is not None:
            return self.find_placement(request, request.n_ctx)
        largest = max(LEAST_TOKENS, request.wanted_tokens)
        best = self.find_placement(request, largest)
        seen = {best.placement}
        for n_ctx in _shorter_contexts(largest):
            if best.fits and best.placement.gpu_layers in (-1, request.gpu_layers):
                break  # neither speed nor context can become better
            if n_ctx < MIN_TOKENS and best.fits:
                break
            candidate = self.find_placement(request, n_ctx)
            if candidate.placement not in seen:
                seen.add(candidate.placement)
                candidate = self._lengthen(candidate, largest)
            if (candidate.fits, candidate.score) > (best.fits, best.score):
                best = candidate
        return self._lengthen(best, largest)

    def find_placement(self, request: PlacementRequest, n_ctx: int) -> PlannedPlacement:
        """Return the fastest placement with a context of `n_ctx` tokens."""
        plans = [self.evaluate(each, n_ctx) for each in self._candidates(request, n_ctx)]
        return max(plans, key=lambda plan: (plan.fits, plan.score, -plan.seconds_per_token))

    def evaluate(self, placement: ModelPlacement, n_ctx: int) -> PlannedPlacement:
        """Return what a placement takes with a context of `n_ctx` tokens, and how fast it is."""
        machine, layout = self.machine, self.layout
        options = replace(self.options, n_ctx=n_ctx)
        cache = self._cache_of(n_ctx)
        distribution = distribute(placement, len(layout.layers), self._free)
        memory = predict_memory(layout, cache, options, distribution, len(machine.devices))
        host_bytes = machine.free_bytes
        needed = memory[0].total + PROCESS_BYTES
        can_run, missing = True, 0
        for device, share in zip(machine.devices, memory[1:], strict=True):
            can_run &= share.total <= device.usable_bytes
            needed += share.total if device.shares_host_memory else 0
        if host_bytes is not None:
            missing = max(0, needed - host_bytes)
            can_run &= missing <= memory[0].cached_weights
        seconds = seconds_per_token(
            layout, machine, distribution, cache, missing, not options.offload_kqv
        )
        return PlannedPlacement(placement, n_ctx, memory, can_run and not missing, can_run, seconds)

    def _candidates(self, request: PlacementRequest, n_ctx: int) -> Iterator[ModelPlacement]:
        """Yield the placements to compare."""
        if request.gpu_layers is not None or not self.machine.devices:
            layers = request.gpu_layers or 0
            experts = request.cpu_moe_layers or 0
            yield ModelPlacement(layers, request.tensor_split, cpu_moe_layers=experts)
            return
        has_workers = any(device.kind == "rpc" for device in self.machine.devices)
        has_candidate = not (request.must_offload or has_workers)  # workers were asked for
        if has_candidate:
            yield ON_HOST
        for used in self._device_sets(request):
            placement = self._fill(request, used, n_ctx)
            if placement is not None:
                has_candidate = True
                yield placement
        if not has_candidate:
            yield ON_HOST  # no layer fits

    def _device_sets(self, request: PlacementRequest) -> Iterator[tuple[int, ...]]:
        """Yield sets of devices: those with the most memory, one more each time. Workers were asked
        for, so they are in all sets.
        """
        devices = self.machine.devices
        if request.tensor_split:
            yield tuple(range(len(devices)))
            return
        workers = [index for index, device in enumerate(devices) if device.kind == "rpc"]
        others = sorted(
            set(range(len(devices))) - set(workers), key=lambda index: -devices[index].usable_bytes
        )
        for count in range(0 if workers else 1, len(others) + 1):
            yield tuple(sorted(workers + others[:count]))

    def _fill(
        self, request: PlacementRequest, used: tuple[int, ...], n_ctx: int
    ) -> ModelPlacement | None:
        """Return the placement with the most layers on the devices `used`, or None if no layer
        fits.
        """
        n_layers = len(self.layout.layers)
        fixed = request.cpu_moe_layers

        def build(n_moved: int, n_host_experts: int) -> ModelPlacement | None:
            return self._distribute_over(request, used, n_moved, n_host_experts, n_ctx)

        has_choice = self.layout.has_experts and fixed is None
        # the fewest layers without experts with which all layers fit
        if complete := _first_built(
            lambda number: build(n_layers + 1, number), 0, n_layers if has_choice else 0, fixed
        ):
            return complete
        experts = -1 if has_choice else fixed or 0
        return _first_built(lambda number: build(n_layers - number, experts), 0, n_layers - 1, None)

    def _distribute_over(
        self,
        request: PlacementRequest,
        used: tuple[int, ...],
        n_moved: int,
        n_host_experts: int,
        n_ctx: int,
    ) -> ModelPlacement | None:
        """Return the placement of the last `n_moved` parts (layers and output) on the devices
        `used`: equally full, or with few layers on workers. Return None if they do not fit.
        """
        n_parts = len(self.layout.layers) + 1
        layers = -1 if n_moved == n_parts else n_moved
        if request.tensor_split or len(self.machine.devices) == 1:
            placement = ModelPlacement(layers, request.tensor_split, cpu_moe_layers=n_host_experts)
            return placement if self.evaluate(placement, n_ctx).can_run else None

        has_workers = any(self.machine.devices[index].kind == "rpc" for index in used)

        def build(share: float) -> ModelPlacement | None:
            shares = {
                index: 1.0 if has_workers and self.machine.devices[index].kind != "rpc" else share
                for index in used
            }
            counts = self._count_layers(shares, n_moved, n_host_experts, n_ctx)
            if counts is None:
                return None
            placement = ModelPlacement(
                layers, split_for_counts(counts), cpu_moe_layers=n_host_experts
            )
            return placement if self.evaluate(placement, n_ctx).can_run else None

        best, low, high = build(1.0), 0.0, 1.0
        for _ in range(BALANCE_STEPS if best and len(used) > 1 else 0):
            middle = (low + high) / 2
            if found := build(middle):
                best, high = found, middle
            else:
                low = middle
        return best

    def _count_layers(
        self,
        shares: Mapping[int, float],
        n_moved: int,
        n_host_experts: int,
        n_ctx: int,
    ) -> list[int] | None:
        """Return how many parts each device gets if devices are filled one after another up to a
        share of their memory; a worker gets at least one. Return None if parts are left.
        """
        used = tuple(shares)
        layout, devices = self.layout, self.machine.devices
        n_layers = len(layout.layers)
        cache = self._cache_of(n_ctx) if self.options.offload_kqv else ()
        options = replace(self.options, n_ctx=n_ctx)
        counts = [0] * len(devices)
        pinned = {place: weights.nbytes for place, weights in layout.pinned}
        everywhere = LayerDistribution(
            (HOST,) * (n_layers + 1 - n_moved) + (used[0],) * (n_moved - 1) + (used[-1],),
            tuple(
                number < n_layers + 1 - n_moved or n_host_experts < 0 or number < n_host_experts
                for number in range(n_layers)
            ),
        )
        memory = predict_memory(layout, (), options, everywhere, len(devices))
        compute = max(share.compute for share in memory[1:])

        def room(index: int) -> float:
            return devices[index].usable_bytes * shares[index] - compute - pinned.get(index, 0)

        position = 0
        left = room(used[0])
        for part in range(n_layers + 1 - n_moved, n_layers + 1):
            size = layout.output
            if part < n_layers:
                layer = layout.layers[part]
                size = layer.dense + (0 if everywhere.has_host_experts[part] else layer.experts)
                size += cache[part] if cache else 0
            while size > left and (counts[used[position]] or devices[used[position]].kind != "rpc"):
                position += 1
                if position == len(used):
                    return None
                left = room(used[position])
            left -= size
            counts[used[position]] += 1
        return counts

    def _lengthen(self, best: PlannedPlacement, largest: int) -> PlannedPlacement:
        """Return the plan with the longest context that fits as well with the same placement."""
        low, high = best.n_ctx, largest
        while high - low >= kv_size.CELL_STEP:
            middle = kv_size.round_up_cells((low + high) // 2)
            if middle in (low, high):
                break
            candidate = self.evaluate(best.placement, middle)
            if candidate.fits >= best.fits and candidate.score >= best.score:
                best, low = candidate, middle
            else:
                high = middle
        return best

    def _cache_of(self, n_ctx: int) -> Sequence[int]:
        """Return the bytes of the cache of each layer."""
        cache = self._cache_bytes(replace(self.options, n_ctx=n_ctx))
        return cache or (0,) * len(self.layout.layers)


def _shorter_contexts(n_ctx: int) -> Iterator[int]:
    """Yield contexts shorter than `n_ctx`, each by about a fifth."""
    while n_ctx > LEAST_TOKENS:
        n_ctx = max(LEAST_TOKENS, n_ctx * 4 // 5 // kv_size.CELL_STEP * kv_size.CELL_STEP)
        yield n_ctx


def _first_built(
    build: Callable[[int], ModelPlacement | None], low: int, high: int, fixed: int | None
) -> ModelPlacement | None:
    """Return build(n) for the smallest n from `low` to `high` for which it is not None; it is None
    for all smaller ones. `fixed`: the only n to try. Return None if it is None for all.
    """
    if fixed is not None:
        return build(fixed)
    best = build(high)
    if best is None:
        return None
    while low < high:
        middle = (low + high) // 2
        if found := build(middle):
            best, high = found, middle
        else:
            low = middle + 1
    return best
