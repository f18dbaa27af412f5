"""Whether a run may begin: it would not die of what it allocates, or there is a nearest setting
that fits.

First the arithmetic of the header (estimate.py), which answers nearly always; near the limit
llama.cpp's own dry run (scales.py), the draft model's beside it. Weights in the mapped file may be
larger than the memory, that is only slow: they are read again. What is allocated must fit: KV,
compute and output buffers, weights laid out anew.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmcli.hardware import estimate, host, limits
from llmcli.runtime import kv
from llmcli.runtime.binding import devices
from llmcli.runtime.binding.context import ContextOptions
from llmcli.runtime.drafting.wish import Drafting, draft_options
from llmcli.runtime.request import RunOptions
from llmcli.runtime.runner import context_options
from llmcli.units import several
from quant import container
from quant.container import Header

PROCESS = (
    256 << 20
)  # bytes of the interpreter with the vocabulary and the graphs, and of what prompts and answers take


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be run. `options` are decided (fit.py); `asked`: the context's size is the user's
    wish, not ours.

    Of `slots` sequences `needed` are for answers at once, the rest keep branches.
    """

    name: str
    header: Header
    options: RunOptions
    gpu_layers: int
    drafting: Drafting
    slots: int = 1
    needed: int = 1
    asked: bool = False

    def but(self, slots: int | None = None, **options: Any) -> "Wish":
        """The same with another number of sequences, or other options."""
        return replace(self, slots=slots or self.slots, options=replace(self.options, **options))

    @property
    def draft(self) -> ContextOptions:
        """The draft model's context beside it."""
        return draft_options(self.context)

    def shortened(self, other: "Wish") -> bool:
        """Whether `other` has a shorter context, and no more is changed that anybody would see."""
        kinds = [(one.options.cache_type_k, one.options.cache_type_v) for one in (self, other)]
        return kinds[0] == kinds[1] and other.slots >= self.needed

    @property
    def context(self) -> ContextOptions:
        """The context that this would be."""
        return context_options(self.options, self.slots, self.drafting, self.gpu_layers)

    def told(self, other: "Wish") -> str:
        """What `other` has that this has not, in words."""
        mine, its = self.options, other.options
        changes = []
        if mine.ctx_size != its.ctx_size:
            changes.append(f"{its.ctx_size:,} tokens of context instead of {mine.ctx_size:,}")
        if (mine.cache_type_k, mine.cache_type_v) != (its.cache_type_k, its.cache_type_v):
            changes.append(f"a {its.cache_type_k} KV cache instead of {mine.cache_type_k}")
        if self.needed > other.slots:
            changes.append(f"{several(other.slots, 'sequence')} instead of {self.needed}")
        return ", ".join(changes) or "one branch of the chat, others are computed again"

    def flags(self, other: "Wish") -> str:
        """The same as flags to type."""
        kinds = other.options.cache_type_k, other.options.cache_type_v
        words = [f"-c {other.options.ctx_size}"]
        if kinds != (self.options.cache_type_k, self.options.cache_type_v):
            words.append(f"-ctk {kinds[0]} -ctv {kinds[1]}")
        return " ".join(words) + (
            f", {several(other.slots, 'sequence')} at once" if self.needed > other.slots else ""
        )


def admit(wish: Wish, fit: str, note: Callable[[str], None]) -> Wish:
    """The wish as it may be run: itself, or with `fit` "on" the nearest setting that fits; "off"
    asks nothing.

    A context that nobody asked for becomes shorter without a word of --fit. Raises UserError with
    the nearest setting.
    """
    if fit == "off" or _plenty(wish):
        return wish
    from llmcli.hardware import scales  # rarely needed, and every start would pay for it

    container.check(wish.header)
    options = wish.options
    kv.check(
        wish.header.metadata,
        options.cache_type_k,
        options.cache_type_v,
        reproducible=options.reproducible,
    )
    with scales.scales(wish) as held:
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
    need = estimate.bound(wish.header, wish.context) + PROCESS
    if wish.drafting.model:
        need += estimate.bound(container.read(wish.drafting.model), wish.draft)
    addresses, threads = (
        limits.address_room(),
        max(wish.context.n_threads, wish.context.n_threads_batch),
    )
    rooms = (
        host.available_memory(),
        devices.gpu_free() if wish.gpu_layers else None,
        None if addresses is None else addresses - threads * limits.THREAD,
    )
    return all(room is None or need <= room for room in rooms)
