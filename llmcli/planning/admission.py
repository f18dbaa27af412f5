"""The memory check before a run: accept it, change it to the nearest settings that fit, or refuse
it.

An upper bound from the file's header suffices nearly always. Near the limit, llama.cpp's own dry
run decides, including the draft model. Weights in the mapped file may exceed the memory, which only
makes the run slow because they are read again. What is allocated must fit: KV cache, compute and
output buffers, and repacked weights.
"""

from collections.abc import Callable

from llmcli.hardware import host, memory_limits
from llmcli.planning import upper_bound
from llmcli.planning.run_plan import Wish
from llmcli.runtime import kv_size
from llmcli.runtime.binding import devices
from quant.model_file import load_checks, read_header

# bytes of the interpreter, the vocabulary, the graphs, and of prompts and answers
PROCESS = 256 << 20


def admit(wish: Wish, fit: str, note: Callable[[str], None]) -> Wish:
    """Return the plan itself if it fits, otherwise the nearest plan that fits, if it may be used.

    With `fit` "on" any change may be made. Without it, only a context whose size was not requested
    is shortened. "off" skips the check. `note` receives messages. Raises UserError with the nearest
    settings that fit.
    """
    if fit == "off" or _plenty(wish):
        return wish
    from llmcli.planning import nearest_fit  # rarely needed, and slow to import

    load_checks.check_loadable(wish.header)
    options = wish.options
    kv_size.check_cache(
        wish.header.metadata,
        options.cache_type_k,
        options.cache_type_v,
        reproducible=options.reproducible,
    )
    with nearest_fit.scales(wish) as dry_run:
        free, disk_note = dry_run.room(wish), dry_run.slow(wish)
        fits = free is None or free >= 0
        if fits and (not disk_note or (wish.asked and fit != "on")):
            return _told(wish, disk_note, note)
        nearest = dry_run.nearest(wish)
        may_use = nearest and (fit == "on" or (not wish.asked and wish.shortened(nearest)))
        # a change from slow to slow gains nothing
        if nearest and may_use and not (fits and dry_run.slow(nearest)):
            label = "--fit" if fit == "on" else "limited by the available memory"
            note(f"{label}: {wish.told(nearest)}")
            return _told(nearest, dry_run.slow(nearest), note)
        if fits:
            return _told(wish, disk_note, note)
        raise dry_run.refusal(wish, nearest)


def _told(wish: Wish, slow: str, note: Callable[[str], None]) -> Wish:
    if slow:
        note(slow)
    return wish


def _plenty(wish: Wish) -> bool:
    """Return whether an upper bound of the memory is below what is available."""
    need = upper_bound.bound(wish.header, wish.context) + PROCESS
    if wish.drafting.model:
        need += upper_bound.bound(read_header.read_header(wish.drafting.model), wish.draft)
    addresses, threads = (
        memory_limits.address_room(),
        max(wish.context.n_threads, wish.context.n_threads_batch),
    )
    capacities = (
        host.available_memory(),
        devices.free_gpu_bytes() if wish.gpu_layers else None,
        None if addresses is None else addresses - threads * memory_limits.THREAD,
    )
    return all(capacity is None or need <= capacity for capacity in capacities)
