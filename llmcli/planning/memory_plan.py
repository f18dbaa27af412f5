"""What a run will take, before anything is allocated: the receipt of `llmcli plan`.

Weights, KV and compute buffers are llama.cpp's own dry run (runtime/binding/rehearsal.py), the KV
of each layer runtime/kv.py's arithmetic, and the interpreter is this process itself, weighed while
the dry run stands. What cannot be known on this machine is None, never a guess. It knows no names
of models and prints nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime import kv_size
from llmcli.runtime.binding import devices
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context_options import MAX_SEQUENCES, ContextOptions
from llmcli.runtime.binding.devices import HOST_DEVICE, BufferType
from llmcli.runtime.binding.dry_run import DryRun, dry_run
from llmcli.runtime.binding.memory_breakdown import MemoryBreakdown
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.speculation import draft_context_options
from quant.model_file.model_header import ModelHeader

KINDS = ("f16", "q8_0", "q4_0")  # cache types whose largest context is told
# Rehearsing a context takes llama.cpp's notes of its cells, some 80 bytes each: none is longer than
# this.
MOST_CELLS = 1 << 20


PARTS = ("weights", "repacked", "kv", "compute", "output", "droppable")


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds, in bytes; None: not known. `weights` are those in the mapped file's
    place or the device's own memory, `repacked` copies in another layout, `droppable` the mapped
    bytes that nobody reads after loading.
    """

    device: str
    weights: int | None
    repacked: int | None
    kv: int | None
    compute: int | None
    output: int
    droppable: int | None
    available: int | None

    @property
    def total(self) -> int | None:
        """All that llama.cpp maps and allocates there."""
        parts = (self.weights, self.repacked, self.kv, self.compute, self.output)
        return None if None in parts else sum(part for part in parts if part)

    def plus(self, other: "Share") -> "Share":
        """Both on one device."""
        sums: dict[str, Any] = {
            part: _sum(getattr(self, part), getattr(other, part)) for part in PARTS
        }
        return replace(self, **sums)

    @property
    def held(self) -> int | None:
        """What of it must stay in memory: all but the weights in the mapped file, which can be read
        again.
        """
        parts = (
            0 if self.device == HOST_DEVICE else self.weights,
            self.repacked,
            self.kv,
            self.compute,
            self.output,
        )
        return None if None in parts else sum(part for part in parts if part)

    @property
    def left(self) -> int | None:
        """Bytes that would stay free, negative where it does not fit; a lower bound where not all
        is known.
        """
        if self.available is None:
            return None
        parts = (self.weights, self.repacked, self.kv, self.compute, self.output)
        return self.available + (self.droppable or 0) - sum(part or 0 for part in parts)

    @property
    def fits(self) -> bool | None:
        """Whether it can be held without the disk's help."""
        if self.left is None or (self.left >= 0 and self.total is None):
            return None
        return self.left >= 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """All devices' shares of one context. `overhead` is the process without them: interpreter,
    libraries, vocabulary, graphs. `resident` is what the process was seen to hold, where it was
    loaded. `draft`: bytes of all this that are a draft model's.
    """

    n_ctx: int
    shares: tuple[Share, ...]
    cache: kv_size.KVCache | None
    overhead: int | None
    resident: int | None = None
    draft: int | None = None

    def sum(self, part: str) -> int | None:
        """A part over all devices."""
        values = [getattr(share, part) for share in self.shares]
        return None if None in values else sum(values)

    @property
    def process(self) -> int | None:
        """Memory of the whole process once the context is full, all that is mapped included: what
        `top` shows.
        """
        own = [share.total for share in self.shares if share.device == HOST_DEVICE]
        if self.resident is not None or self.overhead is None or None in own:
            return self.resident
        return self.overhead + sum(one for one in own if one)

    @property
    def runs(self) -> bool | None:
        """Whether it could be run at all, be it at the speed of the disk: what must stay in memory
        has room.
        """
        rooms = [
            None if share.held is None or share.available is None else share.held <= share.available
            for share in self.shares
        ]
        return False if False in rooms else None if None in rooms else True

    @property
    def fits(self) -> bool | None:
        """Whether every device holds its share; None where one cannot be told and none is too
        small.
        """
        answers = [share.fits for share in self.shares]
        return False if False in answers else None if None in answers else True


class Planner:
    """A model file rehearsed: any number of contexts of it may be asked for. Made by `planner`.

    `beside`: a draft model's, which counts wherever something is said of this one.

    `types`: for each device the bytes that its weights have in the file, by type; empty where that
    is not known.
    """

    def __init__(
        self,
        rehearsal: DryRun,
        header: ModelHeader,
        options: ContextOptions,
        beside: "Planner | None" = None,
    ) -> None:
        self._rehearsal, self._header, self.options, self._beside = (
            rehearsal,
            header,
            options,
            beside,
        )
        self._form = kv_size.read_shape(header.metadata)
        placed = rehearsal.tensor_buffers()
        self._mapped, self._droppable = _mapped(header, placed)
        self.types = _types(header, placed)
        self._free = {HOST_DEVICE: host.available_memory()}
        self._free |= {
            one.name: one.free_bytes
            for one in devices.list_devices()
            if one.kind in devices.GPU_KINDS
        }

    def receipt(self) -> Receipt:
        """What the context that is wanted will take."""
        options = self.options
        if options.n_ctx > MOST_CELLS:
            return self._unrehearsed()
        with self._rehearsal.open_context(options) as made:
            held = host.resident_memory()
            shares, draft = self._shares(made.breakdown, made.output_bytes), self._draft(options)
            cache = self._cache(options, made.n_ctx, sum(share.kv or 0 for share in shares))
            totals = [share.total for share in draft]
            whole = None if None in totals or not draft else sum(one for one in totals if one)
            return Receipt(made.n_ctx, together(shares, draft), cache, held, draft=whole)

    def largest(self, kind: str) -> int | None:
        """The longest context with K and V of one type that fits, in steps of 256 cells; 0: none.

        None where this machine or this model cannot tell; no longer than MOST_CELLS, whatever would
        fit.
        """
        if None in self._free.values() or not self.takes(kind):
            return None
        step = kv_size.CELL_STEP * (1 if self.options.unified else self.options.n_seq_max)
        flash = (
            self.options.flash_attn if kind in kv_size.FLOAT_TYPES else "auto"
        )  # which the others cannot do without

        def room(steps: int) -> int | None:
            options = replace(
                self.options, n_ctx=steps * step, type_k=kind, type_v=kind, flash_attn=flash
            )
            left = [
                share.left if share.total is not None else None for share in self.shares(options)
            ]
            return None if None in left else min(one for one in left if one is not None)

        try:
            found = last(room, MOST_CELLS // step)
        except UserError:  # this type is refused for this model
            return None
        return None if found is None else found * step

    def sequences(self) -> int | None:
        """How many sequences that each have this context's tokens would fit at once; 0: not one,
        None: not known.

        No more than llama.cpp takes (MAX_SEQUENCES), and MOST_CELLS together; many are not read
        apart (fit.attention).
        """
        each = -(-self.options.n_ctx // self.options.n_seq_max)
        many = (
            replace(self.options, flash_attn="auto", can_append=False)
            if self.options.can_append
            else self.options
        )
        if None in self._free.values() or each > MOST_CELLS:
            return None

        def room(count: int) -> int | None:
            left = [
                share.left if share.total is not None else None
                for share in self.shares(
                    replace(many, n_ctx=each * count, n_seq_max=count, n_outputs=count)
                )
            ]
            return None if None in left else min(one for one in left if one is not None)

        return last(room, min(MAX_SEQUENCES, MOST_CELLS // each))

    def shares(self, options: ContextOptions) -> tuple[Share, ...]:
        """Each device's share of another context, the machine's own memory first; raises UserError
        where llama.cpp refuses it.
        """
        with self._rehearsal.open_context(options) as made:
            return together(self._shares(made.breakdown, made.output_bytes), self._draft(options))

    def _draft(self, options: ContextOptions) -> tuple[Share, ...]:
        return self._beside.shares(draft_context_options(options)) if self._beside else ()

    def takes(self, kind: str) -> bool:
        """Whether K and V may be of this type: the size of the model's heads decides."""
        return self._form is None or not kv_size.find_refusal(self._form, kind, kind)

    def _shares(self, allocated: MemoryBreakdown | None, output: int) -> tuple[Share, ...]:
        """Each device's share, the machine's own memory first."""
        if allocated is None:
            return (
                Share(
                    HOST_DEVICE,
                    self._header.tensor_bytes,
                    None,
                    None,
                    None,
                    output,
                    None,
                    self._free[HOST_DEVICE],
                ),
            )
        return shares(allocated, output, self._free, self._mapped, self._droppable)

    def _cache(self, options: ContextOptions, n_ctx: int, nbytes: int) -> kv_size.KVCache | None:
        """The cache layer by layer; None where its rules are not known, or llama.cpp's sum is
        another.
        """
        if self._form is None:
            return None
        flash, slots = options.flash_attn != "off", options.n_seq_max
        cache = kv_size.predict_cache(
            self._form,
            n_ctx,
            options.type_k,
            options.type_v,
            n_ubatch=options.n_ubatch,
            n_seq_max=slots,
            flash=flash,
            unified=options.unified,
        )
        return cache if not nbytes or cache.nbytes == nbytes else None

    def _unrehearsed(self) -> Receipt:
        """A context too long to rehearse: its KV by arithmetic, and no more."""
        options = self.options
        cache = self._cache(options, options.n_ctx, 0)
        known = cache.nbytes if cache else None
        share = Share(
            HOST_DEVICE,
            self._header.tensor_bytes,
            None,
            known,
            None,
            0,
            None,
            self._free[HOST_DEVICE],
        )
        return Receipt(options.n_ctx, (share,), cache, None)


@contextmanager
def planner(
    header: ModelHeader, options: ContextOptions, gpu_layers: int, beside: Planner | None = None
) -> Iterator[Planner]:
    """Rehearse a checked GGUF (quant.container.check) with `options` decided, a draft model
    `beside` it; raises as loading it would.
    """
    with dry_run(
        header.path, gpu_layers=gpu_layers, latent=header.has_latent_attention
    ) as rehearsal:
        yield Planner(rehearsal, header, options, beside)


def most_layers(
    header: ModelHeader, options: ContextOptions, beside: Planner | None = None
) -> int | None:
    """How many of the model's layers (the output counts as one) the GPUs hold with this context;
    None: no GPU here, or it does not tell.
    """
    gpus = {one.name for one in devices.list_devices() if one.kind in devices.GPU_KINDS}
    if not gpus:
        return None

    def room(number: int) -> int | None:
        with planner(header, options, number - 1, beside) as held:
            shares = [share for share in held.shares(options) if share.device in gpus]
        left = [share.left if share.total is not None else None for share in shares]
        return None if None in left else min((one for one in left if one is not None), default=0)

    found = last(room, (header.get_int("block_count") or 0) + 2)
    return None if found is None else max(0, found - 1)


def measure(header: ModelHeader, options: ContextOptions, gpu_layers: int) -> Receipt:
    """The same receipt read off the model really loaded, after one micro-batch has been computed."""
    with (
        open_model(header.path, gpu_layers=gpu_layers, latent=header.has_latent_attention) as model,
        open_context(model, options) as context,
    ):
        allocated = context.memory_breakdown()
        count = min(context.n_ubatch, context.n_batch, context.n_ctx - 1)
        token = model.bos if model.bos is not None else 0
        context.decode(
            BatchRows([token] * count, range(count), [0] * count, [False] * (count - 1) + [True])
        )
        resident = host.resident_memory()
        free: dict[str, int | None] = {HOST_DEVICE: host.available_memory()}
        free |= {
            one.name: one.free_bytes
            for one in devices.list_devices()
            if one.kind in devices.GPU_KINDS
        }
        if allocated is None:
            found: tuple[Share, ...] = (
                Share(
                    HOST_DEVICE,
                    None,
                    None,
                    None,
                    None,
                    context.output_bytes,
                    None,
                    free[HOST_DEVICE],
                ),
            )
        else:
            found = shares(allocated, context.output_bytes, free, None, None)
        return Receipt(context.n_ctx, found, None, None, resident)


def shares(
    allocated: MemoryBreakdown,
    output: int,
    free: dict[str, int | None],
    mapped: int | None,
    droppable: int | None,
) -> tuple[Share, ...]:
    """llmcli's columns of llama.cpp's accounts. `mapped` replaces the weights that a dry run counts
    in the machine's own memory: really loaded, they are one piece of the mapped file.
    """
    names = [
        HOST_DEVICE,
        *sorted({one.buffer_type.device for one in allocated.buffers} - {HOST_DEVICE}),
    ]
    found = []
    for name in names:
        own = [one for one in allocated.buffers if one.buffer_type.device == name]
        weights = sum(one.model_bytes for one in own if not one.buffer_type.is_repacked)
        found.append(
            Share(
                name,
                mapped if mapped is not None and name == HOST_DEVICE else weights,
                sum(one.model_bytes for one in own if one.buffer_type.is_repacked),
                sum(one.context_bytes for one in own),
                sum(one.compute_bytes for one in own),
                output if name == HOST_DEVICE else 0,
                droppable if name == HOST_DEVICE else 0,
                free.get(name),
            )
        )
    return tuple(found)


def together(shares: tuple[Share, ...], others: tuple[Share, ...]) -> tuple[Share, ...]:
    """What two models hold, device by device."""
    found = {share.device: share for share in shares}
    for other in others:
        found[other.device] = found[other.device].plus(other) if other.device in found else other
    return tuple(found.values())


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _mapped(
    header: ModelHeader, placed: list[tuple[str, BufferType]] | None
) -> tuple[int | None, int | None]:
    """Bytes of the file that stay mapped, and how many of them nobody reads once the model is
    loaded.

    As llama_model_loader::get_mapping_range has it: of each file one piece, from the first tensor
    that stays in it to the last. (None, None): this build cannot be asked.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if placed is None or any(name not in tensors for name, _ in placed):
        return None, None
    stay = {name for name, place in placed if place.device == HOST_DEVICE and not place.is_repacked}
    spans = read = 0
    for file in header.files:
        ends = [
            (t.offset, t.offset + t.nbytes)
            for t in header.tensors
            if t.file == file and t.name in stay
        ]
        if ends:
            spans += max(end for _, end in ends) - min(start for start, _ in ends)
            read += sum(end - start for start, end in ends)
    return spans, spans - read


def _types(
    header: ModelHeader, placed: list[tuple[str, BufferType]] | None
) -> dict[str, dict[str, int]]:
    """Device -> type -> bytes in the file; a tensor that lies on one device twice counts once."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    found: dict[str, dict[str, int]] = {}
    for name, device in dict.fromkeys(
        (name, place.device) for name, place in placed or () if name in tensors
    ):
        types, tensor = found.setdefault(device, {}), tensors[name]
        types[tensor.type] = types.get(tensor.type, 0) + tensor.nbytes
    return found


def last(room: Callable[[int], int | None], most: int) -> int | None:
    """The largest n of 1…most with room(n) >= 0, 0 where there is none, None where it is not told;
    room falls.

    It falls nearly in a line: the root of the secant, then its neighbour, is mostly the answer.
    """
    low, high = 1, most
    at_low, at_high = room(low), room(high)
    if at_low is None or at_high is None:
        return None
    if at_low < 0 or at_high >= 0:
        return 0 if at_low < 0 else most
    guess = 0
    while high - low > 1:
        line = low + int((high - low) * at_low / (at_low - at_high))
        guess = min(max(line if line != guess else (low + high) // 2, low + 1), high - 1)
        for n in (guess, guess + 1):
            left = room(n) if low < n < high else None
            if left is not None and left >= 0:
                low, at_low = n, left
            elif left is not None:
                high, at_high = n, left
    return low
