"""The text output of `llmcli plan`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llmcli.planning.dry_runs.memory_plan import DeviceMemory, MemoryPlan
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from llmcli.runtime.binding.placement.model_placement import ModelPlacement
    from llmcli.runtime.kv_size import KVCache, LayerKV
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader

MEMORY_ROWS: "tuple[tuple[str, Callable[[DeviceMemory], int | None]], ...]" = (
    ("weights", lambda share: share.weights),
    ("repacked weights", lambda share: share.repacked),
    ("KV cache", lambda share: share.kv),
    ("compute buffers", lambda share: share.compute),
    ("output buffer", lambda share: share.output),
)
CHECKPOINTS_LABEL = "checkpoints in addition, at most"


def format_title(
    name: str, header: "ModelHeader", options: "ContextOptions", memory_plan: "MemoryPlan"
) -> str:
    """Return one line that describes the planned run: model, file type, context and cache types."""
    slots = options.n_seq_max
    pool_note = (
        ""
        if slots == 1
        else f" for {slots} sequences, " + ("one pool" if options.unified else "one pool each")
    )
    types = f"K {options.type_k}, V {options.type_v}"
    return (
        f"{name} · {header.file_type} · {memory_plan.n_ctx} tokens of context{pool_note} · {types}"
    )


def print_table(
    predicted: "MemoryPlan",
    measured: "MemoryPlan | None",
    max_checkpoints: int,
    draft_kind: str,
    ui: "UI",
) -> None:
    """Print the bytes of each kind of memory. With `measured`, also print the measured bytes and
    the difference. `max_checkpoints`: the most bytes that checkpoints take. `draft_kind`: what the
    draft file has, "draft model" or "draft heads".
    """
    has_several_devices = len(predicted.devices) > 1
    rows: list[tuple[str, int | None, int | None]] = []
    for share in predicted.devices:
        measured_share = (
            next(
                (candidate for candidate in measured.devices if candidate.device == share.device),
                None,
            )
            if measured
            else None
        )
        device_prefix = f"{share.device}: " if has_several_devices else ""
        for label, read_part in MEMORY_ROWS:
            value, actual = read_part(share), read_part(measured_share) if measured_share else None
            if value != 0 or actual:
                rows.append((device_prefix + label, value, actual))
        actual_total = measured_share.total if measured_share else None
        rows.append((f"{device_prefix}llama.cpp total", share.total, actual_total))
    rows.append(("interpreter, libraries, vocabulary", predicted.overhead, None))
    rows.append(
        ("whole process", predicted.process_bytes, measured.process_bytes if measured else None)
    )
    if max_checkpoints:
        rows.append((CHECKPOINTS_LABEL, max_checkpoints, None))
    columns = (
        ("", "predicted", "size", "actual", "difference") if measured else ("", "bytes", "size")
    )
    cells = [
        (
            label,
            _format_bytes(value),
            _format_size(value),
            "" if actual is None else _format_bytes(actual),
            _format_difference(value, actual),
        )
        for label, value, actual in rows
    ]
    ui.table(columns, [row[: len(columns)] for row in cells], right=columns[1:])
    ui.text()
    if predicted.draft is not None:
        verb = "take" if draft_kind.endswith("s") else "takes"
        ui.text(f"the {draft_kind} {verb} {_format_size(predicted.draft)} of this")
    for share in predicted.devices:
        _print_verdict(share, f"{share.device}: " if has_several_devices else "", ui)
    if predicted.fits is False and predicted.can_run:
        ui.text(
            "it would run at the speed of the disk, because the weights are read from the file "
            "again for every token"
        )


def _print_verdict(share: Any, device_prefix: str, ui: "UI") -> None:
    """Print whether the planned memory fits on a device, and how much of it the kernel can drop."""
    verdict = {True: "it fits", False: "it does not fit", None: "whether it fits is unknown"}[
        share.fits
    ]
    if share.droppable:
        ui.text(
            f"{device_prefix}{_format_size(share.droppable)} of the file are read only once: the kernel can "
            "drop them"
        )
    available = (
        "unknown memory is" if share.available is None else f"{_format_size(share.available)} are"
    )
    ui.text(f"{device_prefix}{available} available: {verdict}")


def offload_bytes(predicted: "MemoryPlan", slots: int, checkpoint_bytes: int | None) -> int:
    """Return how much of the free memory the states outside the KV cache may take: those of
    preempted and finished answers, and checkpoints.

    `slots`: the number of parallel answers; with one slot there are only checkpoints.
    `checkpoint_bytes`: of one checkpoint; 0 if the model needs none, None: unknown.
    """
    from llmcli.runtime.kv_cache.host_budget import HostMemory, host_budget

    if slots == 1 and checkpoint_bytes == 0:
        return 0
    return host_budget(HostMemory(predicted.devices[0].free_after))


def max_checkpoint_bytes(checkpoint_bytes: int | None, slots: int, outside_bytes: int) -> int:
    """Return the most bytes that the checkpoints of all slots take together: as many as they keep
    (kv_cache/checkpoints.py), within their share of `outside_bytes` (kv_cache/offload_store.py).

    `checkpoint_bytes`: of one checkpoint. If it is unknown (None), the result is the whole share.
    """
    from llmcli.runtime.kv_cache.checkpoints import MAX_PER_SLOT
    from llmcli.runtime.kv_cache.offload_store import CHECKPOINT_SHARE

    share = outside_bytes // CHECKPOINT_SHARE
    if not checkpoint_bytes:
        return share if checkpoint_bytes is None else 0
    return checkpoint_bytes * min(MAX_PER_SLOT * slots, share // checkpoint_bytes)


def prefill_context_bytes(
    header: "ModelHeader", options: "ContextOptions", placement: "ModelPlacement"
) -> int | None:
    """Return the bytes (KV cache and buffers) of the separate context in which serve and batch read
    prompts; None if unknown.
    """
    from llmcli.planning.dry_runs.memory_plan import open_memory_planner

    with open_memory_planner(header, options, placement) as open_planner:
        memory_plan = open_planner.memory_plan()
    sums = memory_plan.sums
    return sum_or_none((sums.kv, sums.compute, sums.output))


def scoring_bytes(
    header: "ModelHeader", options: "ContextOptions", placement: "ModelPlacement", slots: int
) -> int | None:
    """Return the additional bytes that serve and batch need to score prompt tokens; None if
    unknown.

    The larger compute buffers are allocated at the start, the larger logits buffer with the first
    request for scores.
    """
    from llmcli.planning import resolve_options
    from llmcli.planning.dry_runs.memory_plan import MAX_CELLS, open_memory_planner

    rows = resolve_options.scoring_outputs(header) if slots > 1 else 0
    if not rows:
        return 0
    if options.n_ctx > MAX_CELLS:
        return None
    with open_memory_planner(header, options, placement) as open_planner:
        without_scoring, with_scoring = (
            sum_or_none(
                nbytes
                for share in open_planner.device_memory(context)
                for nbytes in (share.compute, share.output)
            )
            for context in (
                options,
                replace(options, n_outputs=max(options.n_outputs, rows + slots)),
            )
        )
    return (
        None if without_scoring is None or with_scoring is None else with_scoring - without_scoring
    )


def sum_or_none(addends: "Iterable[int | None]") -> int | None:
    """Return the sum of the terms; None if any term is unknown (None)."""
    terms = list(addends)
    return None if None in terms else sum(term for term in terms if term)


def print_extra_bytes(
    outside_bytes: int,
    slots: int,
    prefill_bytes: int | None,
    scored_bytes: int | None,
    ui: "UI",
) -> None:
    """Print the additional memory of serve and batch. Print nothing for a single slot."""
    if prefill_bytes != 0:
        extra_size = (
            "an unknown number of bytes" if prefill_bytes is None else _format_size(prefill_bytes)
        )
        ui.text(
            f"serve and batch read prompts in a separate context, which takes {extra_size} more; "
            "-fa on avoids this"
        )
    if scored_bytes != 0:
        extra_size = (
            "an unknown number of bytes" if scored_bytes is None else _format_size(scored_bytes)
        )
        ui.text(
            f"the buffers of serve and batch take up to {extra_size} more when prompts are scored "
            "(echo and logprobs)"
        )
    if slots > 1:
        ui.text(
            f"serve and batch use up to {_format_size(outside_bytes)} more of the free memory for "
            "preempted and finished answers"
        )


def print_checkpoints(nbytes: int | None, outside_bytes: int, ui: "UI") -> None:
    """Print what a checkpoint of a conversation takes (kv_cache/checkpoints.py). Print nothing if
    the model needs none. `outside_bytes`: as `offload_bytes` returns.
    """
    from llmcli.runtime.kv_cache.checkpoints import MAX_PER_SLOT
    from llmcli.runtime.kv_cache.offload_store import CHECKPOINT_SHARE

    if nbytes != 0:
        size = "an unknown number of bytes" if nbytes is None else f"about {_format_size(nbytes)}"
        share = _format_size(outside_bytes // CHECKPOINT_SHARE)
        ui.text(
            f"a checkpoint, to which a conversation can go back, takes {size} of host memory; "
            f"each conversation keeps up to {MAX_PER_SLOT}, and all together at most {share} of "
            "the free memory"
        )


def print_weight_types(types: dict[str, dict[str, int]], ui: "UI") -> None:
    """Print the bytes of the weights by tensor type, one line for each device. `types`: the bytes
    by device and type.
    """
    for device, bytes_by_type in types.items():
        device_note = f" on {device}" if len(types) > 1 else ""
        rows = sorted(bytes_by_type.items(), key=lambda row: -row[1])
        ui.text(
            f"weights{device_note} by type: "
            + ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in rows)
        )


def print_layers(cache: "KVCache | None", ui: "UI") -> None:
    """Print a table of the KV cache by layer. Layers of equal size share one row."""
    if cache is None:
        ui.text("KV by layer: unknown for this architecture")
        return
    layers_by_size: dict[tuple[int, int, int], list[int]] = {}
    for layer in cache.layers:
        layers_by_size.setdefault(_layer_sizes(layer), []).append(layer.layer)
    ui.text()
    columns = ("KV of layers", "cells", "K bytes each", "V bytes each", "total")
    rows = [
        (format_ranges(layers), f"{cells:,}", f"{k:,}", f"{v:,}", f"{(k + v) * len(layers):,}")
        for (cells, k, v), layers in layers_by_size.items()
    ]
    ui.table(columns, rows, right=columns[1:])


def _layer_sizes(layer: "LayerKV") -> tuple[int, int, int]:
    return layer.cells, layer.k_bytes, layer.v_bytes


def format_ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: [0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _format_bytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _format_size(value: int | None) -> str:
    from llmcli.units import format_size

    return "" if value is None else format_size(value)


def _format_difference(value: int | None, actual: int | None) -> str:
    if value is None or actual is None:
        return ""
    share = f" ({(actual - value) / value:+.2%})" if value and actual != value else ""
    return f"{actual - value:+,}{share}" if actual != value else "0"
