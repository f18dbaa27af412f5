"""What settings would leave free, by llama.cpp's own dry run, and which of them are near.

Used near the limit alone (admit.py): a rehearsal takes as long as reading the vocabulary.
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

GROWTH = 64 << 20  # bytes that Python, prompts and answers take beside what is planned
# tokens: a context is not made shorter than this while smaller types, or fewer sequences, are left
USEFUL = 2048
SMALLER = ("q8_0", "q4_0")  # cache types that are tried, the better one first


class Scales:
    """The model, and the draft model beside it, rehearsed together: what each setting would leave
    free.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.free = {HOST_DEVICE: host.available_memory()}
        self.free |= {
            one.name: one.free_bytes
            for one in devices.list_devices()
            if one.kind in devices.GPU_KINDS
        }
        self._addresses = memory_limits.address_room()

    def shares(self, wish: Wish) -> tuple[Share, ...]:
        """What both hold on each device; of a context too long to rehearse its KV alone."""
        if wish.context.n_ctx <= MOST_CELLS:
            return self._planner.shares(wish.context)
        cache = upper_bound.cache(wish.header, wish.context)
        return (
            Share(HOST_DEVICE, None, None, cache.nbytes if cache else None, None, 0, None, None),
        )

    def room(self, wish: Wish, *, weights: bool = False) -> int | None:
        """Bytes that stay free where least does, negative where it does not fit; None where it
        cannot be told.

        With `weights` those in the mapped file must stay in memory, too, as far as they are read
        again.
        """
        cache, free = upper_bound.cache(wish.header, wish.context), self.free[HOST_DEVICE]
        if cache and free is not None and not wish.gpu_layers and cache.nbytes > free:
            return free - cache.nbytes  # not to be rehearsed
        left = dict(self.free)
        shares = self.shares(wish)
        for share in shares:
            held, free = _whole(share) if weights else share.held, left.get(share.device)
            left[share.device] = None if held is None or free is None else free - held
        rooms = [room for room in left.values() if room is not None]
        if left[HOST_DEVICE] is None or len(rooms) < len(left):
            return None
        rooms[0] -= GROWTH
        if self._addresses is not None:
            mapped = sum(share.total or 0 for share in shares if share.device == HOST_DEVICE)
            threads = max(wish.context.n_threads, wish.context.n_threads_batch)
            rooms.append(self._addresses - mapped - threads * memory_limits.THREAD)
        return min(rooms)

    def longest(self, wish: Wish, *, weights: bool) -> int:
        """The longest context up to the one that is wished that fits (as `room` says); 0: none."""
        most = min(wish.context.n_ctx, MOST_CELLS)

        def room(steps: int) -> int | None:
            return self.room(
                wish.but(ctx_size=min(steps * kv_size.CELL_STEP, most)), weights=weights
            )

        try:
            return min((last(room, -(-most // kv_size.CELL_STEP)) or 0) * kv_size.CELL_STEP, most)
        except UserError:  # this type is refused for this model
            return 0

    def slow(self, wish: Wish) -> str:
        """What to say where the file will be read again and again; nothing elsewhere."""
        room, free = self.room(wish, weights=True), self.free[HOST_DEVICE]
        if room is None or room >= -GROWTH or free is None:
            return ""
        weights = sum(
            share.weights or 0 for share in self.shares(wish) if share.device == HOST_DEVICE
        )
        return (
            f"warning: beside all else the weights in the file ({size(weights)}) do not fit the memory "
            f"({size(free)} are available): expect the speed of the disk"
        )

    def nearest(self, wish: Wish) -> Wish | None:
        """The nearest setting that fits: a shorter context, smaller cache types, fewer answers;
        None: none does.

        As long as one of USEFUL tokens is to be had the context is not made shorter than that. The
        weights of the file have room beside it, unless they are too large for any setting.
        """
        return self._nearest(wish, weights=True) or self._nearest(wish, weights=False)

    def _nearest(self, wish: Wish, *, weights: bool) -> Wish | None:
        useful = min(wish.context.n_ctx, USEFUL)
        found: list[Wish] = []
        slots = wish.needed
        while slots:
            for kinds in _kinds(wish):
                tried = wish.but(slots=slots, cache_type_k=kinds[0], cache_type_v=kinds[1])
                longest = self.longest(tried, weights=weights)
                if longest >= useful:
                    return tried.but(ctx_size=longest)
                found += [tried.but(ctx_size=longest)] if longest else []
            slots //= 2
        return max(found, key=lambda one: one.context.n_ctx, default=None)

    def refusal(self, wish: Wish, found: Wish | None) -> UserError:
        """What is missing, in words, with the nearest setting as its hint."""
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
        beside = " and a draft model" if wish.drafting.model else ""
        told = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sums.items() if nbytes)
        what = f"{wish.name} with {wish.context.n_ctx:,} tokens of context{beside} does not fit: {told}"
        rooms = "unknown" if free is None else size(free)
        if len(self.free) > 1:
            rooms = ", ".join(
                f"{size(room)} on {name}" for name, room in self.free.items() if room is not None
            )
        if self._addresses is not None:
            rooms += f", and {size(self._addresses)} of addresses (ulimit -v)"
        hint = (
            f"{wish.flags(found)} would fit, and --fit takes that"
            if found
            else f"nothing of this model fits: a smaller one may (llmcli plan {wish.name}), or fewer other programs"
        )
        return UserError(f"{what}; {rooms} are available", hint=hint)


@contextmanager
def scales(wish: Wish) -> Iterator[Scales]:
    """Rehearse the models of a checked wish."""
    with ExitStack() as held:
        draft = None
        if wish.drafting.model:
            other = read_header.read_header(wish.drafting.model)
            load_checks.check_loadable(other)
            draft = held.enter_context(planner(other, wish.draft, -1 if wish.gpu_layers else 0))
        yield Scales(held.enter_context(planner(wish.header, wish.context, wish.gpu_layers, draft)))


def _kinds(wish: Wish) -> Iterator[tuple[str, str]]:
    """The cache types of the wish, then smaller ones that this model takes."""
    mine, form = (
        (wish.options.cache_type_k, wish.options.cache_type_v),
        kv_size.read_shape(wish.header.metadata),
    )
    yield mine
    if wish.options.reproducible or wish.options.flash_attn == "off":
        return
    for kind in SMALLER:
        smaller = all(
            kv_size.BYTES_PER_32[kind] <= kv_size.BYTES_PER_32[one] for one in mine
        ) and mine != (
            kind,
            kind,
        )
        if smaller and not (form and kv_size.find_refusal(form, kind, kind)):
            yield kind, kind


def _whole(share: Share) -> int | None:
    return None if share.total is None else share.total - (share.droppable or 0)
