"""Compute how much memory a model and its context need on each device, before anything is
allocated.

A dry run of llama.cpp gives the sizes of weights, KV cache and compute buffers. The KV cache of
each layer is computed from the header (runtime/kv_size.py). The memory of the interpreter is that
of this process during the dry run. A size of None means that it is unknown.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime import kv_size
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES, ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context, open_prediction_context
from llmcli.runtime.binding.contexts.prediction_context import prediction_options
from llmcli.runtime.binding.memory_breakdown import MemoryBreakdown
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.devices import HOST_DEVICE, BufferType
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.binding.trials.dry_run import DryRun, dry_run
from llmcli.runtime.drafting.draft_contexts import (
    draft_file_options,
    layer_input_bytes,
)
from quant.model_file.model_header import ModelHeader

# cache types for which `llmcli plan` prints the largest context
PLANNED_CACHE_TYPES = ("f16", "q8_0", "q4_0")
# Contexts with more cells get no dry run, because llama.cpp allocates about 80 bytes per cell even
# in a dry run.
MAX_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class MemorySums:
    """The bytes of a memory plan by purpose, summed over all devices. The fields mean the same as
    in DeviceMemory. A field is None if it is unknown for at least one device.
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
    """The memory that a run needs on one device (the host or a GPU), in bytes. None: unknown."""

    device: str  # name of the device
    weights: int | None  # weights in the mapped file or in the device's memory
    repacked: int | None  # copies of weights in the layout of this CPU's kernels
    kv: int | None  # KV cache
    compute: int | None  # buffers for intermediate results
    output: int  # buffer for logits
    droppable: int | None  # mapped bytes that are not read after loading; the system can drop them
    available: int | None  # free bytes of the device, before the run
    # whether weights on the host are in the mapped file and not locked: the system can drop them
    is_mapped: bool = True

    @property
    def total(self) -> int | None:
        """Return the bytes that llama.cpp maps and allocates on the device."""
        return _sum_if_known((self.weights, self.repacked, self.kv, self.compute, self.output))

    def combined_with(self, other: "DeviceMemory") -> "DeviceMemory":
        """Return the memory of two models together on this device. `other`: the memory of the
        second model.
        """
        return replace(
            self,
            weights=_sum_if_known((self.weights, other.weights)),
            repacked=_sum_if_known((self.repacked, other.repacked)),
            kv=_sum_if_known((self.kv, other.kv)),
            compute=_sum_if_known((self.compute, other.compute)),
            output=self.output + other.output,
            droppable=_sum_if_known((self.droppable, other.droppable)),
        )

    @property
    def required(self) -> int | None:
        """Return the bytes that must stay in memory. On the host, the weights in the mapped file
        are not included, because the system can read them again, unless they are locked.
        """
        weights = 0 if self.device == HOST_DEVICE and self.is_mapped else self.weights
        return _sum_if_known((weights, self.repacked, self.kv, self.compute, self.output))

    @property
    def free_after(self) -> int | None:
        """Return the bytes that the run leaves free on the device, negative if it does not fit.
        `droppable` bytes count as free, and unknown sizes as 0. Return None if `available` is
        unknown.
        """
        if self.available is None:
            return None
        sizes = (self.weights, self.repacked, self.kv, self.compute, self.output)
        return self.available + (self.droppable or 0) - sum(size or 0 for size in sizes)

    @property
    def fits(self) -> bool | None:
        """Return whether the device has memory for everything, including the weights in the mapped
        file. None: unknown.
        """
        if self.free_after is None or (self.free_after >= 0 and self.total is None):
            return None
        return self.free_after >= 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a model with one context on all devices, in bytes. None: unknown."""

    n_ctx: int  # length of the context in tokens
    devices: tuple[DeviceMemory, ...]  # the host first
    cache: kv_size.KVCache | None  # the KV cache, layer by layer
    overhead: (
        int | None
    )  # the process without the model: interpreter, libraries, vocabulary, graphs
    resident: int | None = None  # measured memory of the process; None after a dry run
    draft: int | None = (
        None  # how many bytes in `devices` belong to a draft model or to draft heads
    )

    @property
    def sums(self) -> MemorySums:
        """Return the bytes by purpose, summed over all devices."""
        return MemorySums(
            weights=_sum_if_known(share.weights for share in self.devices),
            repacked=_sum_if_known(share.repacked for share in self.devices),
            kv=_sum_if_known(share.kv for share in self.devices),
            compute=_sum_if_known(share.compute for share in self.devices),
            output=sum(share.output for share in self.devices),
            droppable=_sum_if_known(share.droppable for share in self.devices),
            total=_sum_if_known(share.total for share in self.devices),
        )

    @property
    def process_bytes(self) -> int | None:
        """Return the memory of the process with a full context, including mapped files. `top` shows
        the same number.
        """
        host_totals = [share.total for share in self.devices if share.device == HOST_DEVICE]
        if self.resident is not None or self.overhead is None or None in host_totals:
            return self.resident
        return self.overhead + sum(total for total in host_totals if total)

    @property
    def can_run(self) -> bool | None:
        """Return whether everything that must stay in memory fits on every device. The run is then
        possible, perhaps only at the speed of the disk. None: unknown.
        """
        results = [
            None
            if share.required is None or share.available is None
            else share.required <= share.available
            for share in self.devices
        ]
        return False if False in results else None if None in results else True

    @property
    def fits(self) -> bool | None:
        """Return whether everything, including the mapped weights, fits on every device. None:
        unknown for at least one device, while it fits on the others.
        """
        results = [share.fits for share in self.devices]
        return False if False in results else None if None in results else True


class DraftMemory(Protocol):
    """The memory of a draft file beside a model."""

    def draft_memory(self, options: ContextOptions) -> tuple[DeviceMemory, ...]:
        """Return the memory on each device, the host first. `options`: those of the model's
        context.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadsMemory:
    """The memory of draft heads: the weights, which the host reads from the mapped file."""

    nbytes: int

    def draft_memory(self, _options: ContextOptions) -> tuple[DeviceMemory, ...]:
        """Return the memory on the host. No context has an influence on it."""
        return (DeviceMemory(HOST_DEVICE, self.nbytes, 0, 0, 0, 0, 0, None),)


class Planner:
    """Computes memory plans for any number of contexts of one model file, by dry runs. Made by
    `open_memory_planner`.
    """

    def __init__(
        self,
        unloaded_model: DryRun,
        header: ModelHeader,
        options: ContextOptions,
        draft: "DraftMemory | None" = None,
        load_mode: str = "auto",
    ) -> None:
        """`unloaded_model`: the model opened without its weights. `draft`: the planner of a draft
        model, or draft heads, whose memory is added to each plan. `load_mode`: as in ModelPlacement.
        """
        self._load_mode = load_mode
        self._dry_run, self.header, self.options = unloaded_model, header, options
        self._draft = draft
        self._cache_shape = kv_size.read_shape(header.metadata)
        tensor_buffers = unloaded_model.tensor_buffers()
        self._mapped: int | None = None
        self._droppable: int | None = 0
        if "mmap" in load_mode or load_mode == "auto":
            self._mapped, self._droppable = _mapped_bytes(header, tensor_buffers)
        # for each device, the bytes of its weights in the file by tensor type; empty if unknown
        self.bytes_by_type = _bytes_by_type(header, tensor_buffers)
        self._free = free_by_device()

    def memory_plan(self) -> MemoryPlan:
        """Return the memory plan of a context with the planner's own `options`. Raises UserError if
        llama.cpp refuses the context.
        """
        options = self.options
        if options.n_ctx > MAX_CELLS:
            return self._plan_without_dry_run()
        with self._dry_run.open_context(options) as context:
            overhead = host.resident_memory()
            shares, draft = (
                self._model_memory(context.breakdown, context.output_bytes),
                self._draft_memory(options),
            )
            cache = self._predict_cache(
                options, context.n_ctx, sum(share.kv or 0 for share in shares)
            )
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
        """Return the longest context, in tokens, that fits if K and V have this type. It is a
        multiple of 256 cells, and at most MAX_CELLS. 0: no context fits. None: unknown, or the
        model does not support the type.
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
        """Return how many sequences fit at once if each is as long as a sequence of the planner's
        `options`. At most MAX_SEQUENCES, with MAX_CELLS cells together. 0: none fits. None:
        unknown.

        All sequences are in one context. A second context for prompts is not counted.
        """
        tokens_per_sequence = -(-self.options.n_ctx // self.options.n_seq_max)
        # they take no memory
        parallel_options = replace(self.options, n_branches=0, has_spare=False)
        if parallel_options.can_append:
            parallel_options = replace(parallel_options, flash_attn="auto", can_append=False)
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
        """Return the memory of the model, of a context with `options`, and of the draft model on
        each device, the host first. Raises UserError if llama.cpp refuses the context.
        """
        with self._dry_run.open_context(options) as context:
            return merge_devices(
                self._model_memory(context.breakdown, context.output_bytes),
                self._draft_memory(options),
            )

    def draft_memory(self, options: ContextOptions) -> tuple[DeviceMemory, ...]:
        """Return the memory of this model on each device, as the draft model of a context with
        `options`.
        """
        host_share, *others = self.device_memory(draft_file_options(self.header, options))
        output = host_share.output + layer_input_bytes(self.header, options)
        return replace(host_share, output=output), *others

    def _draft_memory(self, options: ContextOptions) -> tuple[DeviceMemory, ...]:
        """Return the memory of the draft model or heads on each device; empty without a draft.
        `options`: those of the model's context.
        """
        return () if self._draft is None else self._draft.draft_memory(options)

    def supports_cache_type(self, cache_type: str) -> bool:
        """Return whether K and V of this model can both have this type. Quantized types need heads
        of a suitable size. True if the model's cache cannot be predicted.
        """
        shape = self._cache_shape
        return shape is None or not kv_size.find_refusal(shape, cache_type, cache_type)

    def _model_memory(
        self, breakdown: MemoryBreakdown | None, output: int
    ) -> tuple[DeviceMemory, ...]:
        """Return the memory of this model and a context, without a draft model, on each device, the
        host first.

        `breakdown`: the bytes that llama.cpp reports. If it is None, only the weights and the
        output buffer are known. `output`: bytes of the output buffer.
        """
        if breakdown is None:
            return (
                DeviceMemory(
                    HOST_DEVICE,
                    self.header.tensor_bytes,
                    None,
                    None,
                    None,
                    output,
                    None,
                    self._free[HOST_DEVICE],
                ),
            )
        shares = device_memory(breakdown, output, self._free, self._mapped, self._droppable)
        return tuple(
            replace(share, is_mapped=ModelPlacement(load_mode=self._load_mode).maps_file)
            for share in shares
        )

    def _predict_cache(
        self, options: ContextOptions, n_ctx: int, nbytes: int
    ) -> kv_size.KVCache | None:
        """Return the KV cache of a context of `n_ctx` tokens, layer by layer. Return None if it
        cannot be predicted, or if its size is not `nbytes`, the size that llama.cpp reports. With
        `nbytes` 0 the sizes are not compared.
        """
        if self._cache_shape is None:
            return None
        flash, n_sequences = options.flash_attn != "off", options.n_seq_max
        cache = kv_size.predict_cache(
            self._cache_shape,
            n_ctx,
            options.type_k,
            options.type_v,
            n_ubatch=options.n_ubatch,
            n_seq_max=n_sequences,
            flash=flash,
            unified=options.unified,
        )
        return cache if not nbytes or cache.nbytes == nbytes else None

    def _plan_without_dry_run(self) -> MemoryPlan:
        """Return the plan of a context that is too long for a dry run. It contains only the weights
        and the KV cache.
        """
        options = self.options
        cache = self._predict_cache(options, options.n_ctx, 0)
        kv_bytes = cache.nbytes if cache else None
        share = DeviceMemory(
            HOST_DEVICE,
            self.header.tensor_bytes,
            None,
            kv_bytes,
            None,
            0,
            None,
            self._free[HOST_DEVICE],
        )
        return MemoryPlan(options.n_ctx, (share,), cache, None)


def free_by_device() -> dict[str, int | None]:
    """Return the free bytes of the host and of each GPU, by device name. None: unknown."""
    return {HOST_DEVICE: host.available_memory()} | {
        device.name: device.free_bytes
        for device in devices.list_devices()
        if device.kind in devices.GPU_KINDS
    }


def least_free(shares: Iterable[DeviceMemory]) -> int | None:
    """Return the bytes that stay free on the device with the least free memory, negative if it is
    too small. Return None if they are unknown for any device. `shares`: the memory on each device.
    """
    free_bytes = [share.free_after if share.total is not None else None for share in shares]
    known_bytes = [nbytes for nbytes in free_bytes if nbytes is not None]
    return min(known_bytes, default=0) if len(known_bytes) == len(free_bytes) else None


@contextmanager
def open_memory_planner(
    header: ModelHeader,
    options: ContextOptions,
    placement: ModelPlacement,
    draft: DraftMemory | None = None,
    target: Path | None = None,
) -> Iterator[Planner]:
    """Open the planner of a model file for the `with` block. The header must have been checked, and
    `options` must be resolved. `placement`: that of the weights. `draft`: added to each plan. `target`:
    the file of the model for which an EAGLE-3 draft drafts.

    Raises UserError if llama.cpp cannot load the file.
    """
    opened = dry_run(header.path, placement.for_header(header), target, options.outputs_states)
    with opened as unloaded_model:
        yield Planner(unloaded_model, header, options, draft, placement.load_mode)


def largest_gpu_layers(
    header: ModelHeader,
    options: ContextOptions,
    placement: ModelPlacement,
    draft: DraftMemory | None = None,
) -> int | None:
    """Return the largest number of layers (-ngl) that fit on the GPUs with a context with these
    options, by dry runs. The output matrix counts as one layer. `placement`: of which only the
    number of layers is changed. None: no GPU, or unknown.

    `llmcli plan` reports this number. `-ngl auto` does not use it: plan_placement.py chooses without
    a dry run.
    """
    gpus = {device.name for device in devices.list_devices() if device.kind in devices.GPU_KINDS}
    if not gpus:
        return None

    def free_after(number: int) -> int | None:
        moved = replace(placement, gpu_layers=number - 1)
        with open_memory_planner(header, options, moved, draft) as planner:
            shares = planner.device_memory(options)
        return least_free(share for share in shares if share.device in gpus)

    largest = largest_fitting(free_after, (header.get_int("block_count") or 0) + 2)
    return None if largest is None else max(0, largest - 1)


def measure_loaded(
    header: ModelHeader, options: ContextOptions, placement: ModelPlacement
) -> MemoryPlan:
    """Load the model, compute one micro-batch, and return the memory that it then has. Where the
    context keeps hidden states, the prediction layers (MTP) compute a token, too. Raises UserError
    if llama.cpp cannot load the file.
    """
    predicts = options.outputs_states
    with ExitStack() as stack:
        model = stack.enter_context(
            open_model(header.path, placement.for_header(header), load_mtp=predicts)
        )
        context = stack.enter_context(open_context(model, options))
        breakdown = context.memory_breakdown()
        count = min(context.n_ubatch, context.n_batch, context.n_ctx - 1)
        n_rows = min(count, context.n_outputs)
        token = model.bos if model.bos is not None else 0
        wanted = [False] * (count - n_rows) + [True] * n_rows
        context.decode(BatchRows([token] * count, range(count), [0] * count, wanted))
        output = context.output_bytes
        if predicts:
            prediction = stack.enter_context(
                open_prediction_context(model, context, prediction_options(options))
            )
            prediction.predict([token], 0, np.zeros((1, context.n_embd), np.float32))
            output += prediction.output_bytes + 4 * prediction.n_embd
            added = prediction.memory_breakdown()
            breakdown = breakdown.with_context(added) if breakdown and added else None
        resident = host.resident_memory()
        free = free_by_device()
        if breakdown is None:
            share = DeviceMemory(
                HOST_DEVICE, None, None, None, None, output, None, free[HOST_DEVICE]
            )
            return MemoryPlan(context.n_ctx, (share,), None, None, resident)
        shares = device_memory(breakdown, output, free, None, None)
        return MemoryPlan(context.n_ctx, shares, None, None, resident)


def device_memory(
    breakdown: MemoryBreakdown,
    output: int,
    free: dict[str, int | None],
    mapped: int | None,
    droppable: int | None,
) -> tuple[DeviceMemory, ...]:
    """Return the memory on each device, the host first, from the bytes that llama.cpp reports.

    - `output`: bytes of the output buffer, which is on the host.
    - `free`: free bytes by device.
    - `mapped`: bytes of the model file that stay mapped on the host. They replace the host's
      weights in `breakdown`, which are wrong in a dry run. None: use those in `breakdown`.
    - `droppable`: how many of the mapped bytes are not read after loading.
    """
    names = [
        HOST_DEVICE,
        *sorted({buffer.buffer_type.device for buffer in breakdown.buffers} - {HOST_DEVICE}),
    ]
    device_shares = []
    for name in names:
        buffers = [buffer for buffer in breakdown.buffers if buffer.buffer_type.device == name]
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
    """Return the memory of two models together on each device. `shares` and `others`: the memory of
    the first and of the second model.
    """
    by_device = {share.device: share for share in shares}
    for other in others:
        by_device[other.device] = (
            by_device[other.device].combined_with(other) if other.device in by_device else other
        )
    return tuple(by_device.values())


def _sum_if_known(addends: Iterable[int | None]) -> int | None:
    """Return the sum of `addends`, or None if any of them is None."""
    terms = list(addends)
    known_terms = [term for term in terms if term is not None]
    return sum(known_terms) if len(known_terms) == len(terms) else None


def _mapped_bytes(
    header: ModelHeader, tensor_buffers: list[tuple[str, BufferType]] | None
) -> tuple[int | None, int | None]:
    """Return how many bytes of the model file stay mapped in memory, and how many of these are not
    read after loading. Both are None if `tensor_buffers` is None.

    llama.cpp maps each file as one range, from the first to the last tensor that is used without a
    copy. Tensors in this range that were copied to another buffer are not read again. Source:
    llama_model_loader::get_mapping_range.

    `tensor_buffers`: the name of each tensor and the type of the buffer that contains it.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if tensor_buffers is None or any(name not in tensors for name, _ in tensor_buffers):
        return None, None
    mapped_names = {
        name
        for name, buffer_type in tensor_buffers
        if buffer_type.device == HOST_DEVICE and not buffer_type.is_repacked
    }
    mapped = used = 0
    for file in header.files:
        ranges = [
            (t.offset, t.offset + t.nbytes)
            for t in header.tensors
            if t.file == file and t.name in mapped_names
        ]
        if ranges:
            mapped += max(end for _, end in ranges) - min(start for start, _ in ranges)
            used += sum(end - start for start, end in ranges)
    return mapped, mapped - used


def _bytes_by_type(
    header: ModelHeader, tensor_buffers: list[tuple[str, BufferType]] | None
) -> dict[str, dict[str, int]]:
    """Return for each device the bytes that its tensors take in the file, by tensor type. A tensor
    that a device stores twice counts once. Empty if `tensor_buffers` is None.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    by_device: dict[str, dict[str, int]] = {}
    for name, device in dict.fromkeys(
        (name, buffer_type.device) for name, buffer_type in tensor_buffers or () if name in tensors
    ):
        types, tensor = by_device.setdefault(device, {}), tensors[name]
        types[tensor.type] = types.get(tensor.type, 0) + tensor.nbytes
    return by_device


def largest_fitting(free_after: Callable[[int], int | None], limit: int) -> int | None:
    """Return the largest n from 1 to `limit` for which free_after(n) is not negative, or 0 if it is
    negative for all n. Return None if free_after(1) or free_after(limit) is None.

    `free_after`: returns the bytes that a plan of size n leaves free; they must decrease with n. A
    call is a dry run and nearly linear in n, so the search is a secant search, which needs few
    calls.
    """
    low, high = 1, limit
    at_low, at_high = free_after(low), free_after(high)
    if at_low is None or at_high is None:
        return None
    if at_low < 0 or at_high >= 0:
        return 0 if at_low < 0 else limit
    guess = 0
    while high - low > 1:
        root = low + int((high - low) * at_low / (at_low - at_high))
        # a root that repeats makes no progress, so the range is then halved
        guess = min(max(root if root != guess else (low + high) // 2, low + 1), high - 1)
        for n in (guess, guess + 1):
            free = free_after(n) if low < n < high else None
            if free is not None and free >= 0:
                low, at_low = n, free
            elif free is not None:
                high, at_high = n, free
    return low
