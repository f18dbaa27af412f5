"""What settings would leave free according to llama.cpp's dry run, and the nearest settings that
fit.

Only used near the memory limit: a dry run takes as long as reading the vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from llmcli.errors import UserError
from llmcli.hardware import host, memory_limits
from llmcli.planning import upper_bound
from llmcli.planning.memory_plan import MOST_CELLS, Planner, Share, last, planner
from llmcli.planning.run_plan import Wish
from llmcli.runtime import kv_size
from llmcli.runtime.binding import devices
from llmcli.runtime.binding.devices import HOST_DEVICE
from llmcli.units import size
from quant.model_file import load_checks, read_header

GROWTH = 64 << 20  # bytes that Python, prompts and answers take in addition
# tokens; the context is not shortened below this while smaller types or fewer sequences are
# possible
USEFUL = 2048
SMALLER = ("q8_0", "q4_0")  # cache types to try, in order of quality


class Scales:
    """The dry run of a model with its draft model, from which the free memory of each setting
    follows.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.free = {HOST_DEVICE: host.available_memory()}
        self.free |= {
            device.name: device.free_bytes
            for device in devices.list_devices()
            if device.kind in devices.GPU_KINDS
        }
        self._addresses = memory_limits.address_room()

    def shares(self, wish: Wish) -> tuple[Share, ...]:
        """Return the memory of both models on each device; for a context too long for a dry run
        only its KV cache.
        """
        if wish.context.n_ctx <= MOST_CELLS:
            return self._planner.shares(wish.context)
        cache = upper_bound.cache(wish.header, wish.context)
        return (
            Share(HOST_DEVICE, None, None, cache.nbytes if cache else None, None, 0, None, None),
        )

    def room(self, wish: Wish, *, weights: bool = False) -> int | None:
        """Return the bytes that stay free on the fullest device, negative if it does not fit; None:
        unknown.

        With `weights`, the mapped weights that are read repeatedly must stay in memory, too.
        """
        cache, free = upper_bound.cache(wish.header, wish.context), self.free[HOST_DEVICE]
        if cache and free is not None and not wish.gpu_layers and cache.nbytes > free:
            return free - cache.nbytes  # too large for a dry run
        free_by_device = dict(self.free)
        shares = self.shares(wish)
        for share in shares:
            needed, free = (
                _whole(share) if weights else share.held,
                free_by_device.get(share.device),
            )
            free_by_device[share.device] = None if needed is None or free is None else free - needed
        free_values = [value for value in free_by_device.values() if value is not None]
        if free_by_device[HOST_DEVICE] is None or len(free_values) < len(free_by_device):
            return None
        free_values[0] -= GROWTH
        if self._addresses is not None:
            mapped = sum(share.total or 0 for share in shares if share.device == HOST_DEVICE)
            threads = max(wish.context.n_threads, wish.context.n_threads_batch)
            free_values.append(self._addresses - mapped - threads * memory_limits.THREAD)
        return min(free_values)

    def longest(self, wish: Wish, *, weights: bool) -> int:
        """Return the longest context that fits, at most the requested one; 0: none. `weights` as in
        `free_after`.
        """
        most = min(wish.context.n_ctx, MOST_CELLS)

        def room(steps: int) -> int | None:
            return self.room(
                wish.but(ctx_size=min(steps * kv_size.CELL_STEP, most)), weights=weights
            )

        try:
            return min((last(room, -(-most // kv_size.CELL_STEP)) or 0) * kv_size.CELL_STEP, most)
        except UserError:  # the model does not support this type
            return 0

    def slow(self, wish: Wish) -> str:
        """Return a warning if the file would be read again and again, otherwise an empty string."""
        room, free = self.room(wish, weights=True), self.free[HOST_DEVICE]
        if room is None or room >= -GROWTH or free is None:
            return ""
        weights = sum(
            share.weights or 0 for share in self.shares(wish) if share.device == HOST_DEVICE
        )
        return (
            f"warning: the weights ({size(weights)}) do not fit into memory with everything else "
            f"({size(free)} are available): expect the speed of the disk"
        )

    def nearest(self, wish: Wish) -> Wish | None:
        """Return the nearest plan that fits: a shorter context, smaller cache types, fewer parallel
        answers; None if none does.

        The context is not shortened below MIN_USEFUL_TOKENS while another change suffices. The
        weights fit, too, unless they are too large for any setting.
        """
        return self._nearest(wish, weights=True) or self._nearest(wish, weights=False)

    def _nearest(self, wish: Wish, *, weights: bool) -> Wish | None:
        useful = min(wish.context.n_ctx, USEFUL)
        shorter: list[Wish] = []
        slots = wish.needed
        while slots:
            for kinds in _kinds(wish):
                candidate = wish.but(slots=slots, cache_type_k=kinds[0], cache_type_v=kinds[1])
                longest = self.longest(candidate, weights=weights)
                if longest >= useful:
                    return candidate.but(ctx_size=longest)
                shorter += [candidate.but(ctx_size=longest)] if longest else []
            slots //= 2
        return max(shorter, key=lambda plan: plan.context.n_ctx, default=None)

    def refusal(self, wish: Wish, found: Wish | None) -> UserError:
        """Return the error that says what does not fit, with the nearest plan as its hint."""
        shares, free = self.shares(wish), self.free[HOST_DEVICE]
        parts = {
            "KV cache": "kv",
            "weights in another layout": "repacked",
            "compute buffers": "compute",
        }
        sums = {
            "weights": sum(share.weights or 0 for share in shares if share.device != HOST_DEVICE)
        }
        sums |= {
            name: sum(getattr(share, part) or 0 for share in shares) for name, part in parts.items()
        }
        if not sums["KV cache"] and (cache := upper_bound.cache(wish.header, wish.context)):
            sums["KV cache"] = cache.nbytes
        draft_text = " and a draft model" if wish.drafting.model else ""
        parts_text = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sums.items() if nbytes)
        message = (
            f"{wish.name} with {wish.context.n_ctx:,} tokens of context{draft_text} does not fit:"
            f" {parts_text}"
        )
        available = "unknown" if free is None else size(free)
        if len(self.free) > 1:
            available = ", ".join(
                f"{size(free_bytes)} on {name}"
                for name, free_bytes in self.free.items()
                if free_bytes is not None
            )
        if self._addresses is not None:
            available += f", and {size(self._addresses)} of address space (ulimit -v)"
        hint = (
            f"{wish.flags(found)} would fit; --fit applies this"
            if found
            else f"no setting of this model fits: use a smaller model (llmcli plan {wish.name}) or"
            " close other programs"
        )
        return UserError(f"{message}; {available} are available", hint=hint)


@contextmanager
def scales(wish: Wish) -> Iterator[Scales]:
    """Open the dry run of the models of a checked plan."""
    with ExitStack() as stack:
        draft = None
        if wish.drafting.model:
            draft_header = read_header.read_header(wish.drafting.model)
            load_checks.check_loadable(draft_header)
            draft = stack.enter_context(
                planner(draft_header, wish.draft, -1 if wish.gpu_layers else 0)
            )
        yield Scales(
            stack.enter_context(planner(wish.header, wish.context, wish.gpu_layers, draft))
        )


def _kinds(wish: Wish) -> Iterator[tuple[str, str]]:
    """Yield the cache types of the plan, then smaller ones that the model supports."""
    current, cache_shape = (
        (wish.options.cache_type_k, wish.options.cache_type_v),
        kv_size.read_shape(wish.header.metadata),
    )
    yield current
    if wish.options.reproducible or wish.options.flash_attn == "off":
        return
    for kind in SMALLER:
        smaller = all(
            kv_size.BYTES_PER_32[kind] <= kv_size.BYTES_PER_32[current_kind]
            for current_kind in current
        ) and current != (
            kind,
            kind,
        )
        if smaller and not (cache_shape and kv_size.find_refusal(cache_shape, kind, kind)):
            yield kind, kind


def _whole(share: Share) -> int | None:
    return None if share.total is None else share.total - (share.droppable or 0)
