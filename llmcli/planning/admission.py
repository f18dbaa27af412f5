"""Whether a run may begin: it would not die of what it allocates, or there is a nearest setting
that fits.

First the arithmetic of the header (estimate.py), which answers nearly always; near the limit
llama.cpp's own dry run (scales.py), the draft model's beside it. Weights in the mapped file may be
larger than the memory, that is only slow: they are read again. What is allocated must fit: KV,
compute and output buffers, weights laid out anew.
"""

from collections.abc import Callable

from llmcli.hardware import host, memory_limits
from llmcli.planning import upper_bound
from llmcli.planning.run_plan import Wish
from llmcli.runtime import kv_size
from llmcli.runtime.binding import devices
from quant.model_file import load_checks, read_header

PROCESS = (
    256 << 20
)  # bytes of the interpreter with the vocabulary and the graphs, and of what prompts and answers take


def admit(wish: Wish, fit: str, note: Callable[[str], None]) -> Wish:
    """The wish as it may be run: itself, or with `fit` "on" the nearest setting that fits; "off"
    asks nothing.

    A context that nobody asked for becomes shorter without a word of --fit. Raises UserError with
    the nearest setting.
    """
    if fit == "off" or _plenty(wish):
        return wish
    from llmcli.planning import nearest_fit  # rarely needed, and every start would pay for it

    load_checks.check_loadable(wish.header)
    options = wish.options
    kv_size.check_cache(
        wish.header.metadata,
        options.cache_type_k,
        options.cache_type_v,
        reproducible=options.reproducible,
    )
    with nearest_fit.scales(wish) as held:
        room, slow = held.room(wish), held.slow(wish)
        fits = room is None or room >= 0
        if fits and (not slow or (wish.asked and fit != "on")):
            return _told(wish, slow, note)
        found = held.nearest(wish)
        taken = found and (fit == "on" or (not wish.asked and wish.shortened(found)))
        if found and taken and not (fits and held.slow(found)):  # slow for slow gains nothing
            note(f"{'--fit' if fit == 'on' else 'as much as the memory holds'}: {wish.told(found)}")
            return _told(found, held.slow(found), note)
        if fits:
            return _told(wish, slow, note)
        raise held.refusal(wish, found)


def _told(wish: Wish, slow: str, note: Callable[[str], None]) -> Wish:
    if slow:
        note(slow)
    return wish


def _plenty(wish: Wish) -> bool:
    """Whether there is more memory than this can take, whatever it is in detail."""
    need = upper_bound.bound(wish.header, wish.context) + PROCESS
    if wish.drafting.model:
        need += upper_bound.bound(read_header.read_header(wish.drafting.model), wish.draft)
    addresses, threads = (
        memory_limits.address_room(),
        max(wish.context.n_threads, wish.context.n_threads_batch),
    )
    rooms = (
        host.available_memory(),
        devices.free_gpu_bytes() if wish.gpu_layers else None,
        None if addresses is None else addresses - threads * memory_limits.THREAD,
    )
    return all(room is None or need <= room for room in rooms)
