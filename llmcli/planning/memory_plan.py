"""The memory plan of a run: how much memory a model and its context need on each device, computed
before anything is allocated.

Weights, KV cache and compute buffers come from llama.cpp's own dry run. The KV cache of each layer
is computed by arithmetic. The memory of the interpreter is that of this process during the dry run.
None means unknown.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
from llmcli.runtime.draft_settings import draft_context_options
from quant.model_file.model_header import ModelHeader

PLANNED_CACHE_TYPES = (
    "f16",
    "q8_0",
    "q4_0",
)  # `plan` prints the largest context for each of these cache types
# Longer contexts get no dry run, because it takes about 80 bytes per cell for llama.cpp's own
# bookkeeping.
MAX_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class MemorySums:
    """The parts of a memory plan in bytes, summed over all devices. The fields mean the same as in
    DeviceMemory; None if the part is unknown for at least one device.
    """

    weights: int | None
    repacked: int | None
    kv: int | None
    compute: int | None
    output: int
    droppable: int | None
    total: int | None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that a run needs on one device, in bytes; None: unknown.

    `weights`: in the mapped file or in the device's own memory. `repacked`: copies of weights in
    another layout. `kv`: KV cache. `compute`, `output`: buffers. `droppable`: mapped bytes that are
    not read after loading, so the system can drop them. `available`: free bytes of the device.
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
        """Everything that llama.cpp maps and allocates on the device."""
        return _sum((self.weights, self.repacked, self.kv, self.compute, self.output))

    def combined_with(self, other: "DeviceMemory") -> "DeviceMemory":
        """Return the sum of the memory of two models on this device."""
        return replace(
            self,
            weights=_sum((self.weights, other.weights)),
            repacked=_sum((self.repacked, other.repacked)),
            kv=_sum((self.kv, other.kv)),
            compute=_sum((self.compute, other.compute)),
            output=self.output + other.output,
            droppable=_sum((self.droppable, other.droppable)),
        )

    @property
    def required(self) -> int | None:
        """The bytes that must stay in memory. On the host, this is everything except the weights in
        the mapped file, which the system can read again.
        """
        weights = 0 if self.device == HOST_DEVICE else self.weights
        return _sum((weights, self.repacked, self.kv, self.compute, self.output))

    @property
    def free_after(self) -> int | None:
        """The available bytes minus everything that the run needs except `droppable`; negative if
        it does not fit. Parts that are unknown count as 0. None if the available bytes are unknown.
        """
        if self.available is None:
            return None
        parts = (self.weights, self.repacked, self.kv, self.compute, self.output)
        return self.available + (self.droppable or 0) - sum(part or 0 for part in parts)

    @property
    def fits(self) -> bool | None:
        """Whether the device has memory for everything, so that no weights must be read from the
        disk again; None: unknown.
        """
        if self.free_after is None or (self.free_after >= 0 and self.total is None):
            return None
        return self.free_after >= 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one context on all devices, in bytes.

    `cache`: the KV cache layer by layer. `overhead`: the process without the model, which is
    interpreter, libraries, vocabulary and graphs. `resident`: the measured memory of the process;
    None if only a dry run was made. `draft`: the part of `devices` that belongs to a draft model.
    """

    n_ctx: int
    devices: tuple[DeviceMemory, ...]
    cache: kv_size.KVCache | None
    overhead: int | None
    resident: int | None = None
    draft: int | None = None

    @property
    def sums(self) -> MemorySums:
        """The parts of the plan, summed over all devices."""
        return MemorySums(
            weights=_sum(share.weights for share in self.devices),
            repacked=_sum(share.repacked for share in self.devices),
            kv=_sum(share.kv for share in self.devices),
            compute=_sum(share.compute for share in self.devices),
            output=sum(share.output for share in self.devices),
            droppable=_sum(share.droppable for share in self.devices),
            total=_sum(share.total for share in self.devices),
        )

    @property
    def process_bytes(self) -> int | None:
        """The memory of the whole process with a full context, including mapped files. This is the
        number that `top` shows.
        """
        host_totals = [share.total for share in self.devices if share.device == HOST_DEVICE]
        if self.resident is not None or self.overhead is None or None in host_totals:
            return self.resident
        return self.overhead + sum(total for total in host_totals if total)

    @property
    def can_run(self) -> bool | None:
        """Whether the run is possible, perhaps only at the speed of the disk: everything that must
        stay in memory fits. None: unknown.
        """
        answers = [
            None
            if share.required is None or share.available is None
            else share.required <= share.available
            for share in self.devices
        ]
        return False if False in answers else None if None in answers else True

    @property
    def fits(self) -> bool | None:
        """Whether everything fits on every device. False if it does not fit on one of them;
        otherwise None if it is unknown for one of them.
        """
        answers = [share.fits for share in self.devices]
        return False if False in answers else None if None in answers else True


class Planner:
    """Plans any number of contexts of one model file, by dry runs. Created by
    `open_memory_planner`.

    `draft_planner`: the planner of a draft model, whose memory is added to each plan.
    `bytes_by_type`: for each device, the bytes in the file of its weights by tensor type; empty if
    unknown.
    """

    def __init__(
        self,
        rehearsal: DryRun,
        header: ModelHeader,
        options: ContextOptions,
        draft_planner: "Planner | None" = None,
    ) -> None:
        self._rehearsal, self._header, self.options, self._beside = (
            rehearsal,
            header,
            options,
            draft_planner,
        )
        self._form = kv_size.read_shape(header.metadata)
        placed = rehearsal.tensor_buffers()
        self._mapped, self._droppable = _mapped(header, placed)
        self.bytes_by_type = _types(header, placed)
        self._free = free_by_device()

    def memory_plan(self) -> MemoryPlan:
        """Return the memory plan of the context with the planner's `options`."""
        options = self.options
        if options.n_ctx > MAX_CELLS:
            return self._unrehearsed()
        with self._rehearsal.open_context(options) as context:
            overhead = host.resident_memory()
            shares, draft = (
                self._shares(context.breakdown, context.output_bytes),
                self._draft(options),
            )
            cache = self._cache(options, context.n_ctx, sum(share.kv or 0 for share in shares))
            draft_totals = [share.total for share in draft]
            draft_bytes = (
                None
                if None in draft_totals or not draft
                else sum(total for total in draft_totals if total)
            )
            return MemoryPlan(
                context.n_ctx, merge_devices(shares, draft), cache, overhead, draft=draft_bytes
            )

    def largest_context(self, cache_type: str) -> int | None:
        """Return the longest context that fits if both K and V have this type, in steps of 256
        cells and at most MAX_CELLS. 0: not even one step fits. None: unknown.
        """
        if None in self._free.values() or not self.supports_cache_type(cache_type):
            return None
        step = kv_size.CELL_STEP * (1 if self.options.unified else self.options.n_seq_max)
        # quantized caches require flash attention
        flash = self.options.flash_attn if cache_type in kv_size.FLOAT_TYPES else "auto"

        options = replace(self.options, type_k=cache_type, type_v=cache_type, flash_attn=flash)

        def free_after(steps: int) -> int | None:
            return least_free(self.device_memory(replace(options, n_ctx=steps * step)))

        try:
            largest = largest_fitting(free_after, MAX_CELLS // step)
        except UserError:  # the model does not support this cache type
            return None
        return None if largest is None else largest * step

    def largest_sequence_count(self) -> int | None:
        """Return how many sequences fit at a time if each is as long as one of this context. At
        most MAX_SEQUENCES, and at most MAX_CELLS in total. 0: not even one fits. None: unknown.

        All sequences share one context; a separate context for prompts is not counted.
        """
        tokens_per_sequence = -(-self.options.n_ctx // self.options.n_seq_max)
        parallel_options = (
            replace(self.options, flash_attn="auto", can_append=False)
            if self.options.can_append
            else self.options
        )
        if None in self._free.values() or tokens_per_sequence > MAX_CELLS:
            return None

        def free_after(count: int) -> int | None:
            options = replace(
                parallel_options,
                n_ctx=tokens_per_sequence * count,
                n_seq_max=count,
                n_outputs=count,
            )
            return least_free(self.device_memory(options))

        return largest_fitting(free_after, min(MAX_SEQUENCES, MAX_CELLS // tokens_per_sequence))

    def device_memory(self, options: ContextOptions) -> tuple[DeviceMemory, ...]:
        """Return the memory of a context with other `options` on each device, the host first.
        Raises UserError if llama.cpp refuses the context.
        """
        with self._rehearsal.open_context(options) as context:
            return merge_devices(
                self._shares(context.breakdown, context.output_bytes), self._draft(options)
            )

    def _draft(self, options: ContextOptions) -> tuple[DeviceMemory, ...]:
        return self._beside.device_memory(draft_context_options(options)) if self._beside else ()

    def supports_cache_type(self, cache_type: str) -> bool:
        """Return whether the model supports this type for both K and V, which depends on the size
        of its heads.
        """
        return self._form is None or not kv_size.find_refusal(self._form, cache_type, cache_type)

    def _shares(self, allocated: MemoryBreakdown | None, output: int) -> tuple[DeviceMemory, ...]:
        """Return the memory of this model, without a draft model, on each device, the host first.
        `allocated` None: only the weights and the output buffer are known.
        """
        if allocated is None:
            return (
                DeviceMemory(
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
        return device_memory(allocated, output, self._free, self._mapped, self._droppable)

    def _cache(self, options: ContextOptions, n_ctx: int, nbytes: int) -> kv_size.KVCache | None:
        """Return the KV cache layer by layer. None if the rules for this model are unknown, or if
        the computed size differs from `nbytes`, which llama.cpp reports (0: do not compare).
        """
        if self._form is None:
            return None
        flash, n_sequences = options.flash_attn != "off", options.n_seq_max
        cache = kv_size.predict_cache(
            self._form,
            n_ctx,
            options.type_k,
            options.type_v,
            n_ubatch=options.n_ubatch,
            n_seq_max=n_sequences,
            flash=flash,
            unified=options.unified,
        )
        return cache if not nbytes or cache.nbytes == nbytes else None

    def _unrehearsed(self) -> MemoryPlan:
        """Return the plan of a context that is too long for a dry run. Only the weights and the KV
        cache are known.
        """
        options = self.options
        cache = self._cache(options, options.n_ctx, 0)
        kv_bytes = cache.nbytes if cache else None
        share = DeviceMemory(
            HOST_DEVICE,
            self._header.tensor_bytes,
            None,
            kv_bytes,
            None,
            0,
            None,
            self._free[HOST_DEVICE],
        )
        return MemoryPlan(options.n_ctx, (share,), cache, None)


def free_by_device() -> dict[str, int | None]:
    """Return the free bytes of the host and of each GPU, by device name; None: unknown."""
    return {HOST_DEVICE: host.available_memory()} | {
        device.name: device.free_bytes
        for device in devices.list_devices()
        if device.kind in devices.GPU_KINDS
    }


def least_free(shares: Iterable[DeviceMemory]) -> int | None:
    """Return the smallest number of bytes that stay free on any device, negative if a device is too
    small; None if it is unknown for a device.
    """
    free_bytes = [share.free_after if share.total is not None else None for share in shares]
    known_bytes = [nbytes for nbytes in free_bytes if nbytes is not None]
    return min(known_bytes, default=0) if len(known_bytes) == len(free_bytes) else None


@contextmanager
def open_memory_planner(
    header: ModelHeader,
    options: ContextOptions,
    gpu_layers: int,
    draft_planner: Planner | None = None,
) -> Iterator[Planner]:
    """Open a planner for a model file whose header was checked, with resolved `options`. Raises the
    same errors as loading the file.
    """
    with dry_run(
        header.path, gpu_layers=gpu_layers, latent=header.has_latent_attention
    ) as rehearsal:
        yield Planner(rehearsal, header, options, draft_planner)


def largest_gpu_layers(
    header: ModelHeader, options: ContextOptions, draft_planner: Planner | None = None
) -> int | None:
    """Return the largest number of layers (-ngl) that fit on the GPUs with this context, by dry
    runs. The output counts as one layer. None: no GPU, or unknown.

    Only `llmcli plan` reports this number. `-ngl auto` does not use it: `_gpu_layers` in
    resolve_options.py estimates the number without a dry run.
    """
    gpus = {device.name for device in devices.list_devices() if device.kind in devices.GPU_KINDS}
    if not gpus:
        return None

    def free_after(number: int) -> int | None:
        with open_memory_planner(header, options, number - 1, draft_planner) as planner:
            shares = planner.device_memory(options)
        return least_free(share for share in shares if share.device in gpus)

    largest = largest_fitting(free_after, (header.get_int("block_count") or 0) + 2)
    return None if largest is None else max(0, largest - 1)


def measure_loaded(header: ModelHeader, options: ContextOptions, gpu_layers: int) -> MemoryPlan:
    """Load the model, compute one micro-batch, and return the measured memory plan."""
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
        free = free_by_device()
        if allocated is None:
            devices_memory: tuple[DeviceMemory, ...] = (
                DeviceMemory(
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
            devices_memory = device_memory(allocated, context.output_bytes, free, None, None)
        return MemoryPlan(context.n_ctx, devices_memory, None, None, resident)


def device_memory(
    allocated: MemoryBreakdown,
    output: int,
    free: dict[str, int | None],
    mapped: int | None,
    droppable: int | None,
) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device from llama.cpp's memory breakdown, the host first.

    `output`: bytes of the output buffer on the host. `free`: free bytes by device. `mapped`: bytes
    of the file that a loaded model maps on the host, which replace the weights of a dry run; None:
    keep these. `droppable`: how many of the mapped bytes are not read after loading.
    """
    names = [
        HOST_DEVICE,
        *sorted({buffer.buffer_type.device for buffer in allocated.buffers} - {HOST_DEVICE}),
    ]
    device_shares = []
    for name in names:
        buffers = [buffer for buffer in allocated.buffers if buffer.buffer_type.device == name]
        weights = sum(
            buffer.model_bytes for buffer in buffers if not buffer.buffer_type.is_repacked
        )
        device_shares.append(
            DeviceMemory(
                name,
                mapped if mapped is not None and name == HOST_DEVICE else weights,
                sum(buffer.model_bytes for buffer in buffers if buffer.buffer_type.is_repacked),
                sum(buffer.context_bytes for buffer in buffers),
                sum(buffer.compute_bytes for buffer in buffers),
                output if name == HOST_DEVICE else 0,
                droppable if name == HOST_DEVICE else 0,
                free.get(name),
            )
        )
    return tuple(device_shares)


def merge_devices(
    shares: tuple[DeviceMemory, ...], others: tuple[DeviceMemory, ...]
) -> tuple[DeviceMemory, ...]:
    """Add the memory of two models, device by device."""
    by_device = {share.device: share for share in shares}
    for other in others:
        by_device[other.device] = (
            by_device[other.device].combined_with(other) if other.device in by_device else other
        )
    return tuple(by_device.values())


def _sum(addends: Iterable[int | None]) -> int | None:
    """Return the sum; None if any of `addends` is None."""
    terms = list(addends)
    known_terms = [term for term in terms if term is not None]
    return sum(known_terms) if len(known_terms) == len(terms) else None


def _mapped(
    header: ModelHeader, placed: list[tuple[str, BufferType]] | None
) -> tuple[int | None, int | None]:
    """Return how many bytes of the model file stay mapped, and how many of these are not read after
    loading. (None, None): unknown in this build of llama.cpp.

    `placed`: the buffer type of each tensor. Each file is mapped as one piece, from the first to
    the last tensor that is used in place. Tensors between them that were copied elsewhere are not
    read again. Source: llama_model_loader::get_mapping_range.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if placed is None or any(name not in tensors for name, _ in placed):
        return None, None
    mapped_names = {
        name for name, place in placed if place.device == HOST_DEVICE and not place.is_repacked
    }
    spans = read = 0
    for file in header.files:
        ranges = [
            (t.offset, t.offset + t.nbytes)
            for t in header.tensors
            if t.file == file and t.name in mapped_names
        ]
        if ranges:
            spans += max(end for _, end in ranges) - min(start for start, _ in ranges)
            read += sum(end - start for start, end in ranges)
    return spans, spans - read


def _types(
    header: ModelHeader, placed: list[tuple[str, BufferType]] | None
) -> dict[str, dict[str, int]]:
    """Return the bytes that tensors take in the file, by device and tensor type. If a device stores
    a tensor twice, it counts once.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    by_device: dict[str, dict[str, int]] = {}
    for name, device in dict.fromkeys(
        (name, place.device) for name, place in placed or () if name in tensors
    ):
        types, tensor = by_device.setdefault(device, {}), tensors[name]
        types[tensor.type] = types.get(tensor.type, 0) + tensor.nbytes
    return by_device


def largest_fitting(free_after: Callable[[int], int | None], limit: int) -> int | None:
    """Return the largest n from 1 to `limit` for which free_after(n) is at least 0. 0: there is
    none. None: unknown.

    `free_after` must decrease with n. It is nearly linear, so the secant's root or the number after
    it is usually the answer.
    """
    low, high = 1, limit
    at_low, at_high = free_after(low), free_after(high)
    if at_low is None or at_high is None:
        return None
    if at_low < 0 or at_high >= 0:
        return 0 if at_low < 0 else limit
    guess = 0
    while high - low > 1:
        line = low + int((high - low) * at_low / (at_low - at_high))
        guess = min(max(line if line != guess else (low + high) // 2, low + 1), high - 1)
        for n in (guess, guess + 1):
            free = free_after(n) if low < n < high else None
            if free is not None and free >= 0:
                low, at_low = n, free
            elif free is not None:
                high, at_high = n, free
    return low
