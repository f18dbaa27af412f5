"""The memory check before a run. It accepts the planned settings, changes them to the nearest
settings that fit, or refuses the run.

Nearly always, an upper bound computed from the file's header shows that the run fits. If it does
not, a dry run of llama.cpp decides, which includes the draft model. KV cache, compute and output
buffers and repacked weights are allocated, so they must fit. The weights in the mapped file may
exceed the memory: the system then reads them again and again, which only makes the run slow.
"""

from collections.abc import Callable

from llmcli.hardware import host, memory_limits
from llmcli.planning import upper_bound
from llmcli.planning.run_plan import RunPlan
from llmcli.runtime import kv_size
from llmcli.runtime.binding import devices
from quant.model_file import load_checks, read_header

# bytes of everything else in the process: interpreter, vocabulary, graphs, prompts and answers
PROCESS_BYTES = 256 << 20


def check_memory(plan: RunPlan, fit_mode: str, note: Callable[[str], None]) -> RunPlan:
    """Return the plan itself if it fits, otherwise the nearest plan that fits, if `fit_mode` allows
    it.

    `fit_mode` "on" allows any change. "off" skips the check. With any other mode, the context may
    be shortened if the user did not set its size, and nothing else may change. `note` receives
    messages for the user. Raises UserError, with the nearest settings that fit as its hint.
    """
    if fit_mode == "off" or _plenty(plan):
        return plan
    from llmcli.planning import nearest_fit  # imported only when needed, because the import is slow

    load_checks.check_loadable(plan.header)
    options = plan.options
    kv_size.check_cache(
        plan.header.metadata,
        options.cache_type_k,
        options.cache_type_v,
        reproducible=options.reproducible,
    )
    with nearest_fit.open_nearest_fit(plan) as dry_run:
        free, disk_note = dry_run.free_after(plan), dry_run.disk_warning(plan)
        fits = free is None or free >= 0
        if fits and (not disk_note or (plan.is_ctx_requested and fit_mode != "on")):
            return _told(plan, disk_note, note)
        nearest = dry_run.find_nearest(plan)
        may_use = nearest and (
            fit_mode == "on" or (not plan.is_ctx_requested and plan.only_shortens_to(nearest))
        )
        # if both plans would be slow, a change gains nothing
        if nearest and may_use and not (fits and dry_run.disk_warning(nearest)):
            label = "--fit" if fit_mode == "on" else "limited by the available memory"
            note(f"{label}: {plan.describe(nearest)}")
            return _told(nearest, dry_run.disk_warning(nearest), note)
        if fits:
            return _told(plan, disk_note, note)
        raise dry_run.build_error(plan, nearest)


def _told(wish: RunPlan, slow: str, note: Callable[[str], None]) -> RunPlan:
    if slow:
        note(slow)
    return wish


def _plenty(wish: RunPlan) -> bool:
    """Return whether the run fits for certain: an upper bound of its memory is at most what is
    available.
    """
    need = upper_bound.upper_bound_bytes(wish.header, wish.context) + PROCESS_BYTES
    if wish.drafting.model:
        need += upper_bound.upper_bound_bytes(
            read_header.read_header(wish.drafting.model), wish.draft_context
        )
    addresses, threads = (
        memory_limits.address_free_bytes(),
        max(wish.context.n_threads, wish.context.n_threads_batch),
    )
    capacities = (
        host.available_memory(),
        devices.free_gpu_bytes() if wish.gpu_layers else None,
        None if addresses is None else addresses - threads * memory_limits.THREAD_BYTES,
    )
    return all(capacity is None or need <= capacity for capacity in capacities)
