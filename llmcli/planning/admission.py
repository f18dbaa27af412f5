"""Check before a run whether it fits into memory. The check accepts the planned settings, changes
them to the nearest settings that fit, or refuses the run.

In most cases an upper bound, computed from the file's header, shows that the run fits. If it does
not, a dry run of llama.cpp decides, which includes the draft model. KV cache, compute and output
buffers and repacked weights are allocated, so they must fit. The weights in the mapped file may be
larger than the memory. The system then reads them again and again, which only makes the run slow.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from llmcli.errors import UserError
from llmcli.hardware import host, memory_limits
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.planning.machine import read_machine
from llmcli.planning.placement.device_shares import share_devices
from llmcli.planning.placement.placement_search import PROCESS_BYTES
from llmcli.planning.placement.plan_placement import parse_layers, plan_placement
from llmcli.planning.prediction import upper_bound
from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer
from llmcli.runtime import kv_size
from llmcli.runtime.binding.model import AllocationError
from llmcli.runtime.drafting.draft_contexts import layer_input_bytes
from llmcli.runtime.requests.request import RunOptions
from llmcli.units import format_size
from quant.model_file import load_checks, read_header

# parts of the free memory of devices for which to search a placement until it fits by a dry run
DEVICE_SHARES = (1.0, 0.9, 0.75, 0.5, 0.0)


def check_memory(plan: RunPlan, fit_mode: str, note: Callable[[str], None]) -> RunPlan:
    """Return the plan itself if it fits into memory. Otherwise return the plan that fits with the
    smallest changes, if `fit_mode` allows these changes.

    `fit_mode`: "on" allows any change, and "off" skips the check. Any other value only allows what
    the user did not set: a shorter context, or other layers on devices. `note` receives messages for
    the user.

    Raises UserError when no allowed plan fits. Its hint contains the nearest settings that fit.
    """
    if fit_mode == "off" or _surely_fits(plan):
        return plan
    from llmcli.planning.dry_runs import nearest_fit

    load_checks.check_loadable(plan.header)
    options = plan.options
    kv_size.check_cache(
        plan.header.metadata,
        options.cache_type_k,
        options.cache_type_v,
        reproducible=options.reproducible,
    )
    with nearest_fit.open_nearest_fit(plan) as dry_run:
        free, disk_warning = dry_run.free_after(plan), dry_run.disk_warning(plan)
        fits = free is None or free >= 0
        if fits and (not disk_warning or (plan.is_ctx_requested and fit_mode != "on")):
            return _with_note(plan, disk_warning, note)
        if not fits and dry_run.has_copies(plan) and not dry_run.exceeds_device(plan):
            mapped = replace(plan, placement=replace(plan.placement, repack=False))
            fitting = check_memory(mapped, fit_mode, note)
            note(
                "limited by the available memory: the weights stay in the layout of the file, which "
                "is slower; --fit off overrides this"
            )
            return fitting
        if dry_run.exceeds_device(plan) and (moved := _find_moved_plan(plan)):
            if fit_mode == "on" or moved.keeps_typed:
                _note_change(plan, moved.plan, fit_mode, note)
                return _with_note(moved.plan, moved.disk_warning, note)
            raise dry_run.build_error(plan, moved.plan)
        nearest = dry_run.find_nearest(plan)
        may_use = nearest and (
            fit_mode == "on" or (not plan.is_ctx_requested and plan.only_shortens_to(nearest))
        )
        # a change to a plan that is also slow gains nothing
        if nearest and may_use and not (fits and dry_run.disk_warning(nearest)):
            _note_change(plan, nearest, fit_mode, note)
            return _with_note(nearest, dry_run.disk_warning(nearest), note)
        if fits:
            return _with_note(plan, disk_warning, note)
        raise dry_run.build_error(plan, nearest)


def _note_change(
    plan: RunPlan, changed: RunPlan, fit_mode: str, note: Callable[[str], None]
) -> None:
    """Pass to `note` what is changed from a plan, and which flags keep it."""
    if fit_mode == "on":
        note(f"--fit: {plan.describe(changed)}")
    else:
        note(
            f"limited by the available memory: {plan.describe(changed)}; "
            f"{changed.describe_flags(plan)} --fit off overrides this"
        )


def explain_failed_load(plan: RunPlan, error: AllocationError) -> UserError:
    """Return the error for an accepted plan that could not be loaded, because memory or a device is
    gone since it was checked. Its hint has the nearest settings that fit now.
    """
    # imported only when needed, because the import is slow
    from llmcli.planning.dry_runs import memory_plan, nearest_fit

    nearest = None
    with suppress(UserError):
        if plan.placement.uses_gpu and (moved := _find_moved_plan(plan)):
            nearest = moved.plan
        if nearest is None:
            with nearest_fit.open_nearest_fit(plan) as dry_run:
                nearest = dry_run.find_nearest(plan)
    if nearest is None or nearest == plan:
        return error
    free = ", ".join(
        f"{format_size(nbytes)} on {name}"
        for name, nbytes in memory_plan.free_by_device().items()
        if nbytes is not None
    )
    return UserError(
        f"{error}; {free or 'an unknown amount of memory'} are free now",
        hint=f"{plan.describe_flags(nearest)} would fit; llmcli plan {plan.name} shows more",
    )


@dataclass(frozen=True, slots=True)
class _MovedPlan:
    """A plan with other layers or experts on devices. `keeps_typed`: nothing that the user has typed
    is changed. `disk_warning`: see NearestFit.disk_warning.
    """

    plan: RunPlan
    keeps_typed: bool
    disk_warning: str


def _find_moved_plan(plan: RunPlan) -> _MovedPlan | None:
    """Return the plan with fewer layers or experts on GPUs and workers, so that it fits. Values that
    the user has typed are only changed if nothing else fits. Return None if nothing fits.
    """
    options = plan.options
    typed = parse_layers(options.gpu_layers) is not None
    moved = _move_layers(plan, replace(options, gpu_layers="auto"), keeps_typed=not typed)
    untyped = replace(options, gpu_layers="auto", cpu_moe="auto", tensor_split=())
    if moved is None and untyped != replace(options, gpu_layers="auto"):
        moved = _move_layers(plan, untyped, keeps_typed=False)
    return moved


def _move_layers(plan: RunPlan, options: RunOptions, *, keeps_typed: bool) -> _MovedPlan | None:
    """Return the plan with a placement that fits by a dry run, or None. `options`: what the search
    may not change. `keeps_typed`: for the result.
    """
    from llmcli.planning.dry_runs import nearest_fit

    machine = read_machine()
    for share in DEVICE_SHARES:
        smaller = replace(
            machine,
            devices=tuple(
                replace(device, free_bytes=int(device.free_bytes * share))
                for device in machine.devices
            ),
        )
        size = plan.context.n_ctx
        placement = plan_placement(plan.header, options, smaller, size, plan.slots).placement
        placement = replace(placement, ggml_types=plan.placement.ggml_types)
        moved = replace(plan, placement=placement)
        if moved == plan:
            continue
        with nearest_fit.open_nearest_fit(moved) as dry_run:
            free = dry_run.free_after(moved)
            if free is None or free >= 0:
                return _MovedPlan(moved, keeps_typed, dry_run.disk_warning(moved))
    return None


def _with_note(plan: RunPlan, warning: str, note: Callable[[str], None]) -> RunPlan:
    """Return `plan`, after passing `warning` to `note` if it is not empty."""
    if warning:
        note(warning)
    return plan


def _surely_fits(plan: RunPlan) -> bool:
    """Return whether an upper bound of the run's memory is at most the available memory of the
    host, of each device and of the address space (ulimit -v).
    """
    draft_bytes = 0
    if plan.drafting.model:
        draft = read_header.read_header(plan.drafting.model)
        draft_bytes = upper_bound.upper_bound_bytes(draft, plan.draft_context)
        draft_bytes += layer_input_bytes(draft, plan.context)
    if plan.drafting.heads:
        draft_bytes += plan.drafting.heads.nbytes
    needed = upper_bound.upper_bound_bytes(plan.header, plan.context) + PROCESS_BYTES + draft_bytes
    addresses = memory_limits.address_free_bytes()
    threads = max(plan.context.n_threads, plan.context.n_threads_batch)
    capacities = (
        host.available_memory(),
        None if addresses is None else addresses - threads * memory_limits.THREAD_BYTES,
    )
    return all(
        capacity is None or needed <= capacity for capacity in capacities
    ) and _surely_fits_devices(plan, draft_bytes)


def _surely_fits_devices(plan: RunPlan, draft_bytes: int) -> bool:
    """Return whether an upper bound of the run's memory on each GPU and worker is at most what is
    free there. `draft_bytes`: of a draft model, which may be on any of them. A cache that cannot be
    predicted surely fits nowhere.
    """
    if not plan.placement.uses_gpu:
        return True
    if cache_bytes_by_layer(plan.header, plan.context) is None:
        return False
    buffers = upper_bound.buffer_bytes(plan.header, plan.context)
    machine = read_machine()
    shares = share_devices(plan.header, plan.options, plan.placement, plan.context, machine)
    free = {device.name: device.usable_bytes for device in machine.all_devices}
    return all(
        share.total_bytes - share.compute_bytes + buffers + draft_bytes <= free[share.device]
        for share in shares
        if share.device in free
    )
