"""Compute by a dry run how much memory a planned run leaves free, and search for the plan with the
smallest changes that fits.

This is only used when the upper bound of upper_bound.py does not fit, because a dry run reads the
vocabulary of the model and is therefore slow.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from llmcli.errors import UserError
from llmcli.hardware import memory_limits
from llmcli.planning.dry_runs.memory_plan import (
    MAX_CELLS,
    DeviceMemory,
    DraftMemory,
    HeadsMemory,
    Planner,
    free_by_device,
    largest_fitting,
    open_memory_planner,
)
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.planning.prediction import key_precision, upper_bound
from llmcli.runtime import kv_size
from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.runtime.drafting.draft_files.eagle3_match import is_eagle3
from llmcli.units import format_size
from quant.model_file import read_header

# by how much the process grows during a run: Python objects, prompts and answers
GROWTH_BYTES = 64 << 20
# A context is only shortened below this number of tokens if neither a smaller cache type nor fewer
# sequences are enough.
MIN_USEFUL_TOKENS = 2048
# pairs of cache types for K and V to try, best quality first. Values tolerate few bits better than
# keys do (docs/quality.md). Kernels of GPUs take a pair of different types only in special builds.
SMALLER_CACHE_TYPES = (("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))


class NearestFit:
    """Dry runs of a model together with its draft model, to find plans that fit into the memory of
    this machine. Made by `open_nearest_fit`.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.free_by_device = free_by_device()
        self._free_address_bytes = memory_limits.address_free_bytes()

    def device_memory(self, plan: RunPlan) -> tuple[DeviceMemory, ...]:
        """Return the memory that the model and its draft model need on each device. For a context
        that is too long for a dry run, only the KV cache is known.
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
        """Return the bytes that a plan leaves free on the device with the least free memory. The
        number is negative if the plan does not fit, and None if it is unknown.

        `weights`: whether the weights in the mapped model file count. They need not stay in memory,
        because the system can read them from the file again; but the run is then slow.
        """
        cache, free = (
            upper_bound.predict_cache(plan.header, plan.context),
            self.free_by_device[HOST_DEVICE],
        )
        if cache and free is not None and not plan.placement.uses_gpu and cache.nbytes > free:
            return free - cache.nbytes  # the cache alone is too large, so a dry run is not needed
        free_bytes = dict(self.free_by_device)
        shares = self.device_memory(plan)
        for share in shares:
            needed, free = (
                _reread_bytes(share) if weights else share.required,
                free_bytes.get(share.device),
            )
            free_bytes[share.device] = None if needed is None or free is None else free - needed
        free_values = [value for value in free_bytes.values() if value is not None]
        if free_bytes[HOST_DEVICE] is None or len(free_values) < len(free_bytes):
            return None
        free_values[0] -= GROWTH_BYTES
        if self._free_address_bytes is not None:
            mapped = sum(share.total or 0 for share in shares if share.device == HOST_DEVICE)
            threads = max(plan.context.n_threads, plan.context.n_threads_batch)
            free_values.append(
                self._free_address_bytes - mapped - threads * memory_limits.THREAD_BYTES
            )
        return min(free_values)

    def exceeds_device(self, plan: RunPlan) -> bool:
        """Return whether a plan needs more memory on a GPU or worker than is free there."""
        shares = self.device_memory(plan)
        return any(share.fits is False for share in shares if share.device != HOST_DEVICE)

    def has_copies(self, plan: RunPlan) -> bool:
        """Return whether weights are copied into the layout of the CPU's kernels."""
        return any(share.repacked for share in self.device_memory(plan))

    def largest_context(self, plan: RunPlan, *, weights: bool) -> int:
        """Return the longest context, in tokens, with which the plan fits. It is at most that of
        the plan, and 0 if no context fits. `weights`: as in `free_after`.
        """
        max_tokens = min(plan.context.n_ctx, MAX_CELLS)

        def free_after(steps: int) -> int | None:
            ctx_size = min(steps * kv_size.CELL_STEP, max_tokens)
            return self.free_after(plan.with_changes(ctx_size=ctx_size), weights=weights)

        try:
            steps = largest_fitting(free_after, -(-max_tokens // kv_size.CELL_STEP)) or 0
            return min(steps * kv_size.CELL_STEP, max_tokens)
        except UserError:  # the model does not support this cache type
            return 0

    def disk_warning(self, plan: RunPlan) -> str:
        """Return a warning if the memory cannot hold the weights besides everything else, so that
        the run would read them from the file again and again. Otherwise return "".
        """
        free_after = self.free_after(plan, weights=True)
        free = self.free_by_device[HOST_DEVICE]
        if free_after is None or free_after >= -GROWTH_BYTES or free is None:
            return ""
        weights = sum(
            share.weights or 0 for share in self.device_memory(plan) if share.device == HOST_DEVICE
        )
        return (
            f"warning: the weights ({format_size(weights)}) do not fit into memory with everything "
            f"else ({format_size(free)} are available): expect the speed of the disk"
        )

    def find_nearest(self, plan: RunPlan) -> RunPlan | None:
        """Return the plan that fits with the smallest changes, or None if no plan fits. The changes
        are a shorter context, smaller cache types and fewer sequences.

        The context is not shortened below MIN_USEFUL_TOKENS if another change is enough. A plan
        with which the weights stay in memory is preferred to one with which they do not.
        """
        return self._nearest(plan, weights=True) or self._nearest(plan, weights=False)

    def _nearest(self, plan: RunPlan, *, weights: bool) -> RunPlan | None:
        """Return the nearest plan that fits, or None. `weights`: as in `free_after`."""
        useful_tokens = min(plan.context.n_ctx, MIN_USEFUL_TOKENS)
        short_plans: list[RunPlan] = []  # plans that fit with fewer tokens than that
        slots = plan.required_slots
        while slots:
            for type_k, type_v in _cache_type_pairs(plan):
                candidate = plan.with_changes(slots=slots, cache_type_k=type_k, cache_type_v=type_v)
                longest = self.largest_context(candidate, weights=weights)
                if longest >= useful_tokens:
                    return candidate.with_changes(ctx_size=longest)
                short_plans += [candidate.with_changes(ctx_size=longest)] if longest else []
            slots //= 2
        return max(short_plans, key=lambda plan: plan.context.n_ctx, default=None)

    def _no_fit_hint(self, plan: RunPlan) -> str:
        """Return what to do if no setting fits. The limit may be that of the shell."""
        address, free = self._free_address_bytes, self.free_by_device[HOST_DEVICE]
        if address is not None and (free is None or address < free):
            return "no setting of this model fits into the limit of this shell: ulimit -v unlimited"
        return (
            f"no setting of this model fits: use a smaller model (llmcli plan {plan.name}) or close"
            " other programs"
        )

    def build_error(self, plan: RunPlan, nearest: RunPlan | None) -> UserError:
        """Return the error for a plan that does not fit. The message contains the sizes of weights,
        cache and buffers. The hint contains the flags of `nearest`, the nearest plan that fits.
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
        if self._free_address_bytes is not None:
            available += (
                f", and {format_size(self._free_address_bytes)} of address space (ulimit -v)"
            )
        trained = plan.header.context_length or 0
        is_beyond = nearest and trained and nearest.context.n_ctx > trained * plan.required_slots
        remark = f" (the model was trained on {trained:,} tokens)" if is_beyond else ""
        hint = (
            f"{plan.describe_flags(nearest)} would fit{remark}; --fit applies this"
            if nearest
            else self._no_fit_hint(plan)
        )
        return UserError(f"{message}; {available} are available", hint=hint)


@contextmanager
def open_draft_memory(plan: RunPlan) -> Iterator[DraftMemory | None]:
    """Open the draft model or the draft heads of a plan for dry runs during the `with` block; None if
    it has neither. The draft file must have been checked (DraftSettings.for_draft_file).
    """
    with ExitStack() as stack:
        heads = plan.drafting.heads
        draft: DraftMemory | None = HeadsMemory(heads.nbytes) if heads else None
        if plan.drafting.model:
            draft_header = read_header.read_header(plan.drafting.model)
            draft = stack.enter_context(
                open_memory_planner(
                    draft_header,
                    plan.draft_context,
                    plan.placement.for_draft(),
                    target=plan.header.path if is_eagle3(draft_header) else None,
                )
            )
        yield draft


@contextmanager
def open_nearest_fit(plan: RunPlan) -> Iterator[NearestFit]:
    """Open the model and the draft model of a plan for dry runs, and close them after the `with`
    block. The caller must have checked the model's header (load_checks.check_loadable) and the draft
    file (DraftSettings.for_draft_file).
    """
    with (
        open_draft_memory(plan) as draft,
        open_memory_planner(plan.header, plan.context, plan.placement, draft) as planner,
    ):
        yield NearestFit(planner)


def _cache_type_pairs(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield pairs of cache types for K and V: those of the plan, and then smaller ones that the
    model supports.
    """
    current = plan.options.cache_type_k, plan.options.cache_type_v
    cache_shape = kv_size.read_shape(plan.header.metadata)
    yield current
    if plan.options.reproducible or plan.options.flash_attn == "off":
        return
    for type_k, type_v in SMALLER_CACHE_TYPES:
        is_smaller = (type_k, type_v) != current and all(
            kv_size.BYTES_PER_32[kind] <= kv_size.BYTES_PER_32[current_kind]
            for kind, current_kind in zip((type_k, type_v), current, strict=True)
        )
        if (
            is_smaller
            and (type_k == type_v or not plan.placement.uses_gpu)
            and not key_precision.describe_key_loss(plan.header, type_k)
            and not (cache_shape and kv_size.find_refusal(cache_shape, type_k, type_v))
        ):
            yield type_k, type_v


def _reread_bytes(share: DeviceMemory) -> int | None:
    """Return the bytes on a device that a run reads repeatedly, including the weights in the mapped
    file. None: unknown.
    """
    return None if share.total is None else share.total - (share.droppable or 0)
