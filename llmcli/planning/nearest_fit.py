"""Dry runs that show how much memory a plan would leave free, and a search for the nearest plan
that fits.

Only used when an upper bound does not fit, since a dry run takes as long as reading the vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from llmcli.errors import UserError
from llmcli.hardware import memory_limits
from llmcli.planning import upper_bound
from llmcli.planning.memory_plan import (
    MAX_CELLS,
    DeviceMemory,
    Planner,
    free_by_device,
    largest_fitting,
    open_memory_planner,
)
from llmcli.planning.run_plan import RunPlan
from llmcli.runtime import kv_size
from llmcli.runtime.binding.devices import HOST_DEVICE
from llmcli.units import format_size
from quant.model_file import load_checks, read_header

# bytes that the process grows by during a run, for Python objects, prompts and answers
GROWTH_BYTES = 64 << 20
# A context is only shortened below this number of tokens if no smaller cache type and no smaller
# number of sequences helps.
MIN_USEFUL_TOKENS = 2048
SMALLER_CACHE_TYPES = ("q8_0", "q4_0")  # cache types to try, best quality first


class NearestFit:
    """Dry runs of a model together with its draft model. They tell how much memory a plan leaves
    free.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.free_by_device = free_by_device()
        self._addresses = memory_limits.address_free_bytes()

    def device_memory(self, plan: RunPlan) -> tuple[DeviceMemory, ...]:
        """Return the memory of the model and its draft model on each device. For a context that is
        too long for a dry run, only the KV cache is known.
        """
        if plan.context.n_ctx <= MAX_CELLS:
            return self._planner.device_memory(plan.context)
        cache = upper_bound.predict_cache(plan.header, plan.context)
        return (
            DeviceMemory(
                HOST_DEVICE, None, None, cache.nbytes if cache else None, None, 0, None, None
            ),
        )

    def free_after(self, plan: RunPlan, *, weights: bool = False) -> int | None:
        """Return the bytes that a plan leaves free on the fullest device, negative if it does not
        fit; None: unknown.

        Without `weights`, mapped weights do not count, because the system can read them again. With
        `weights`, the mapped weights that a run reads repeatedly must stay in memory, too.
        """
        cache, free = (
            upper_bound.predict_cache(plan.header, plan.context),
            self.free_by_device[HOST_DEVICE],
        )
        if cache and free is not None and not plan.gpu_layers and cache.nbytes > free:
            return free - cache.nbytes  # the cache alone is too large, so a dry run is not needed
        free_bytes = dict(self.free_by_device)
        shares = self.device_memory(plan)
        for share in shares:
            needed, free = (
                _whole(share) if weights else share.required,
                free_bytes.get(share.device),
            )
            free_bytes[share.device] = None if needed is None or free is None else free - needed
        free_values = [value for value in free_bytes.values() if value is not None]
        if free_bytes[HOST_DEVICE] is None or len(free_values) < len(free_bytes):
            return None
        free_values[0] -= GROWTH_BYTES
        if self._addresses is not None:
            mapped = sum(share.total or 0 for share in shares if share.device == HOST_DEVICE)
            threads = max(plan.context.n_threads, plan.context.n_threads_batch)
            free_values.append(self._addresses - mapped - threads * memory_limits.THREAD_BYTES)
        return min(free_values)

    def largest_context(self, plan: RunPlan, *, weights: bool) -> int:
        """Return the longest context that fits, at most that of the plan; 0 if none fits.
        `weights`: as in `free_after`.
        """
        most = min(plan.context.n_ctx, MAX_CELLS)

        def room(steps: int) -> int | None:
            return self.free_after(
                plan.with_changes(ctx_size=min(steps * kv_size.CELL_STEP, most)), weights=weights
            )

        try:
            return min(
                (largest_fitting(room, -(-most // kv_size.CELL_STEP)) or 0) * kv_size.CELL_STEP,
                most,
            )
        except UserError:  # the model does not support this cache type
            return 0

    def disk_warning(self, plan: RunPlan) -> str:
        """Return a warning if the weights do not stay in memory, so that the run would read them
        from the file again and again; otherwise "".
        """
        room, free = self.free_after(plan, weights=True), self.free_by_device[HOST_DEVICE]
        if room is None or room >= -GROWTH_BYTES or free is None:
            return ""
        weights = sum(
            share.weights or 0 for share in self.device_memory(plan) if share.device == HOST_DEVICE
        )
        return (
            f"warning: the weights ({format_size(weights)}) do not fit into memory with everything else "
            f"({format_size(free)} are available): expect the speed of the disk"
        )

    def find_nearest(self, plan: RunPlan) -> RunPlan | None:
        """Return the nearest plan that fits; None if none does. It may have a shorter context,
        smaller cache types or fewer sequences.

        The context is not shortened below MIN_USEFUL_TOKENS if another change suffices. The weights
        stay in memory, unless they are too large for any setting.
        """
        return self._nearest(plan, weights=True) or self._nearest(plan, weights=False)

    def _nearest(self, wish: RunPlan, *, weights: bool) -> RunPlan | None:
        useful = min(wish.context.n_ctx, MIN_USEFUL_TOKENS)
        shorter: list[RunPlan] = []
        slots = wish.required_slots
        while slots:
            for kinds in _kinds(wish):
                candidate = wish.with_changes(
                    slots=slots, cache_type_k=kinds[0], cache_type_v=kinds[1]
                )
                longest = self.largest_context(candidate, weights=weights)
                if longest >= useful:
                    return candidate.with_changes(ctx_size=longest)
                shorter += [candidate.with_changes(ctx_size=longest)] if longest else []
            slots //= 2
        return max(shorter, key=lambda plan: plan.context.n_ctx, default=None)

    def build_error(self, plan: RunPlan, nearest: RunPlan | None) -> UserError:
        """Return the error for a plan that does not fit. It states the sizes of the parts; its hint
        is the nearest plan.
        """
        shares, free = self.device_memory(plan), self.free_by_device[HOST_DEVICE]
        sums = {
            "weights": sum(share.weights or 0 for share in shares if share.device != HOST_DEVICE),
            "KV cache": sum(share.kv or 0 for share in shares),
            "weights in another layout": sum(share.repacked or 0 for share in shares),
            "compute buffers": sum(share.compute or 0 for share in shares),
        }
        if not sums["KV cache"] and (cache := upper_bound.predict_cache(plan.header, plan.context)):
            sums["KV cache"] = cache.nbytes
        draft_text = " and a draft model" if plan.drafting.model else ""
        parts_text = ", ".join(
            f"{name} {format_size(nbytes)}" for name, nbytes in sums.items() if nbytes
        )
        message = (
            f"{plan.name} with {plan.context.n_ctx:,} tokens of context{draft_text} does not fit:"
            f" {parts_text}"
        )
        available = "unknown" if free is None else format_size(free)
        if len(self.free_by_device) > 1:
            available = ", ".join(
                f"{format_size(free_bytes)} on {name}"
                for name, free_bytes in self.free_by_device.items()
                if free_bytes is not None
            )
        if self._addresses is not None:
            available += f", and {format_size(self._addresses)} of address space (ulimit -v)"
        hint = (
            f"{plan.describe_flags(nearest)} would fit; --fit applies this"
            if nearest
            else f"no setting of this model fits: use a smaller model (llmcli plan {plan.name}) or"
            " close other programs"
        )
        return UserError(f"{message}; {available} are available", hint=hint)


@contextmanager
def open_nearest_fit(plan: RunPlan) -> Iterator[NearestFit]:
    """Open dry runs of the model and the draft model of a plan. The model's header must have been
    checked.
    """
    with ExitStack() as stack:
        draft = None
        if plan.drafting.model:
            draft_header = read_header.read_header(plan.drafting.model)
            load_checks.check_loadable(draft_header)
            draft = stack.enter_context(
                open_memory_planner(draft_header, plan.draft_context, -1 if plan.gpu_layers else 0)
            )
        yield NearestFit(
            stack.enter_context(
                open_memory_planner(plan.header, plan.context, plan.gpu_layers, draft)
            )
        )


def _kinds(wish: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield the types of K and V in the plan, then the smaller types that the model supports."""
    current, cache_shape = (
        (wish.options.cache_type_k, wish.options.cache_type_v),
        kv_size.read_shape(wish.header.metadata),
    )
    yield current
    if wish.options.reproducible or wish.options.flash_attn == "off":
        return
    for kind in SMALLER_CACHE_TYPES:
        smaller = all(
            kv_size.BYTES_PER_32[kind] <= kv_size.BYTES_PER_32[current_kind]
            for current_kind in current
        ) and current != (
            kind,
            kind,
        )
        if smaller and not (cache_shape and kv_size.find_refusal(cache_shape, kind, kind)):
            yield kind, kind


def _whole(share: DeviceMemory) -> int | None:
    return None if share.total is None else share.total - (share.droppable or 0)
