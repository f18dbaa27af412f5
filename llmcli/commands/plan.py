"""`llmcli plan`: parse, rehearse, print the receipt. What is in it is hardware/plan.py's."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.show import Json, Ref, start

if TYPE_CHECKING:
    from llmcli.hardware.plan import Receipt
    from llmcli.runtime.binding.context import ContextOptions
    from llmcli.runtime.kv import KVCache, LayerKV
    from llmcli.runtime.request import RunOptions
    from llmcli.ui import UI
    from quant.container import Header

Context = Annotated[int | None, typer.Option("-c", "--ctx-size", help="Tokens of context; default: as chat's.")]
Batch = Annotated[int, typer.Option("-b", "--batch-size", help="Tokens of a logical batch.")]
Ubatch = Annotated[int, typer.Option("-ub", "--ubatch-size", help="Tokens of a physical batch.")]
Threads = Annotated[int | None, typer.Option("-t", "--threads", help="Threads; default: the physical cores.")]
Layers = Annotated[str, typer.Option("-ngl", "--gpu-layers", help="Layers on the GPU: a number, all, auto.")]
Flash = Annotated[str, typer.Option("-fa", "--flash-attn", help="Flash attention: on, off, auto.")]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]
Parallel = Annotated[int, typer.Option("-np", "--parallel", min=1, help="Sequences at once.")]
Unified = Annotated[
    bool, typer.Option("--kv-unified/--no-kv-unified", "-kvu/-no-kvu", help="One pool of cells, or one a sequence.")
]
Quant = Annotated[str | None, typer.Option("--quant", metavar="TYPE", help="As if quantized to this type.")]
Measure = Annotated[bool, typer.Option("--measure", help="Load it, and tell the difference.")]

PARTS = (
    ("weights", "weights"), ("weights in another layout", "repacked"), ("KV cache", "kv"),
    ("compute buffers", "compute"), ("output buffer", "output"),
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("plan")(plan)


def plan(
    ref: Ref,
    ctx_size: Context = None,
    batch_size: Batch = 2048,
    ubatch_size: Ubatch = 512,
    threads: Threads = None,
    gpu_layers: Layers = "auto",
    flash_attn: Flash = "auto",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    parallel: Parallel = 1,
    unified: Unified = True,
    quant: Quant = None,
    measure: Measure = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
) -> None:
    """Tell every byte of a run before it is allocated, and whether it fits."""
    from llmcli.commands.standing import standing
    from llmcli.errors import UserError
    from llmcli.hardware import plan as planning
    from llmcli.runtime.request import RunOptions
    from quant import container

    config, ui = start(json, offline)
    options = RunOptions(
        ctx_size or None, threads, None, batch_size, ubatch_size, gpu_layers, flash_attn, type_k, type_v
    )
    with standing(ref, quant, config, ui) as subject:
        header = container.read(subject.path)
        container.check(header)
        wanted, layers = _decided(header, options, parallel, unified, ui)
        if measure and subject.lacks:
            raise UserError(f"{subject.name} cannot be measured: {subject.lacks}", hint="leave out --measure")
        with planning.planner(header, wanted, layers) as planner:
            told = planner.receipt()
        if measure and told.fits is False:
            raise UserError(
                f"{subject.name} does not fit and was not loaded", hint="leave out --measure to see what it would take"
            )
        # Looking for the longest contexts leaves the process larger than it was: not before it is weighed again.
        found = planning.measure(header, wanted, layers) if measure else None
        with planning.planner(header, wanted, layers) as planner:
            types = planner.types
            longest = {kind: planner.largest(kind) for kind in planning.KINDS}
            taken = [kind for kind in planning.KINDS if planner.takes(kind)]
        if json:
            ui.result({**document(told, longest, types), **({"actual": document(found)} if found else {})})
            return
        ui.text(_title(subject.name, header, wanted, told) + (f" · {subject.lacks}" if subject.lacks else ""))
        _table(told, found, ui)
        _types(types, ui)
        _layers(told.cache, ui)
        _longest({kind: longest[kind] for kind in taken}, header.context_length, ui)
        if told.fits is False:
            _instead(longest, wanted, ui)


def _decided(
    header: "Header", options: "RunOptions", slots: int, unified: bool, ui: "UI"
) -> "tuple[ContextOptions, int]":
    """What chat would make of these options, and a wish that it would refuse as it is."""
    from llmcli.hardware import fit
    from llmcli.runtime import kv
    from llmcli.runtime.binding.context import ContextOptions

    fit.check(options)
    kv.check(header.metadata, options.cache_type_k, options.cache_type_v)
    filled, layers = fit.decide(header, replace(options, ctx_size=None), lambda text: None, slots)
    size = options.ctx_size or filled.ctx_size
    assert size and filled.threads, filled
    if header.context_length and size > header.context_length * slots:
        ui.warn(f"a context of {size} is longer than the {header.context_length} tokens this model was trained on")
    return ContextOptions(
        size, options.batch_size, min(options.ubatch_size, options.batch_size), slots, filled.threads,
        filled.threads_batch or filled.threads, options.cache_type_k, options.cache_type_v, options.flash_attn, unified,
    ), layers  # fmt: skip


def document(
    receipt: "Receipt", longest: dict[str, int | None] | None = None, types: dict[str, dict[str, int]] | None = None
) -> dict[str, Any]:
    """The contract's `plan --json`; null is a figure that this machine cannot tell."""
    cache, first = receipt.cache, receipt.shares[0]
    layers = [
        {"layer": layer.layer, "cells": layer.cells, "k_bytes": layer.k_bytes, "v_bytes": layer.v_bytes}
        for layer in (cache.layers if cache else ())
    ]
    return {
        "weights_bytes": receipt.sum("weights"),
        "kv": {
            "bytes_per_token": cache.bytes_per_token if cache else None, "cells": receipt.n_ctx,
            "bytes": receipt.sum("kv"), "layers": layers if cache else None,
        },
        "compute_bytes": receipt.sum("compute"), "output_bytes": receipt.sum("output"),
        "repacked_bytes": receipt.sum("repacked"), "droppable_bytes": receipt.sum("droppable"),
        "overhead_bytes": receipt.overhead, "process_bytes": receipt.process, "total_bytes": receipt.sum("total"),
        "available_bytes": first.available, "fits": receipt.fits, "max_ctx": longest,
        "devices": [
            {
                "name": share.device, "weights_bytes": share.weights, "repacked_bytes": share.repacked,
                "kv_bytes": share.kv, "compute_bytes": share.compute, "output_bytes": share.output,
                "total_bytes": share.total, "available_bytes": share.available, "fits": share.fits,
                "types": types.get(share.device) if types else None,
            }
            for share in receipt.shares
        ],
    }  # fmt: skip


def _title(name: str, header: "Header", options: "ContextOptions", receipt: "Receipt") -> str:
    slots = options.n_seq_max
    pool = "" if slots == 1 else f" for {slots} sequences, " + ("one pool" if options.unified else "a part for each")
    types = f"K {options.type_k}, V {options.type_v}"
    return f"{name} · {header.file_type} · {receipt.n_ctx} tokens of context{pool} · {types}"


def _table(told: "Receipt", found: "Receipt | None", ui: "UI") -> None:
    """The receipt line by line; with `found` what was really taken beside it, and the difference."""
    several = len(told.shares) > 1
    rows: list[tuple[str, int | None, int | None]] = []
    for share in told.shares:
        other = next((one for one in found.shares if one.device == share.device), None) if found else None
        on = f"{share.device}: " if several else ""
        rows += [
            (on + label, getattr(share, part), getattr(other, part, None))
            for label, part in PARTS
            if getattr(share, part) != 0 or getattr(other, part, 0)
        ]
        rows.append((f"{on}llama.cpp in all", share.total, getattr(other, "total", None)))
    rows.append(("interpreter, libraries, vocabulary", told.overhead, None))
    rows.append(("the whole process", told.process, found.process if found else None))
    columns = ("", "predicted", "size", "actual", "difference") if found else ("", "bytes", "size")
    cells = [
        (label, _bytes(value), _size(value), "" if actual is None else _bytes(actual), _difference(value, actual))
        for label, value, actual in rows
    ]
    ui.table(columns, [row[: len(columns)] for row in cells], right=columns[1:])
    ui.text()
    for share in told.shares:
        _verdict(share, f"{share.device}: " if several else "", ui)


def _verdict(share: Any, on: str, ui: "UI") -> None:
    """Whether a device can hold its share, and what of it need not stay."""
    answer = {True: "it fits", False: "it does not fit", None: "whether it fits is unknown"}[share.fits]
    if share.droppable:
        ui.text(f"{on}{_size(share.droppable)} of the file are read once: under pressure the kernel drops them")
    room = "unknown memory is" if share.available is None else f"{_size(share.available)} are"
    ui.text(f"{on}{room} available: {answer}")


def _types(types: dict[str, dict[str, int]], ui: "UI") -> None:
    """What the weights are stored as, on each device."""
    for device, found in types.items():
        on = f" on {device}" if len(types) > 1 else ""
        rows = sorted(found.items(), key=lambda row: -row[1])
        ui.text(f"weights{on} by type: " + ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in rows))


def _layers(cache: "KVCache | None", ui: "UI") -> None:
    """The cache by layers, those alike in one line."""
    if cache is None:
        ui.text("KV by layer: unknown, this architecture's cache follows rules of its own")
        return
    alike: dict[tuple[int, int, int], list[int]] = {}
    for layer in cache.layers:
        alike.setdefault(_kind(layer), []).append(layer.layer)
    ui.text()
    columns = ("KV of layers", "cells", "K bytes each", "V bytes each", "in all")
    rows = [
        (_ranges(layers), f"{cells:,}", f"{k:,}", f"{v:,}", f"{(k + v) * len(layers):,}")
        for (cells, k, v), layers in alike.items()
    ]
    ui.table(columns, rows, right=columns[1:])


def _kind(layer: "LayerKV") -> tuple[int, int, int]:
    return layer.cells, layer.k_bytes, layer.v_bytes


def _longest(longest: dict[str, int | None], trained: int, ui: "UI") -> None:
    """The longest contexts that the memory holds."""
    from llmcli.hardware.plan import MOST_CELLS

    words = [
        f"{kind} {'unknown' if cells is None else f'{cells:,}' + (' or more' if cells == MOST_CELLS else '')}"
        for kind, cells in longest.items()
    ]
    ui.text()
    ui.text(f"longest context that fits: {', '.join(words)}" + (f" (trained on {trained:,})" if trained else ""))


def _instead(longest: dict[str, int | None], options: "ContextOptions", ui: "UI") -> None:
    """The nearest settings that fit."""
    ways = [
        f"-c {cells}" + ("" if options.type_k == options.type_v == kind else f" -ctk {kind} -ctv {kind}")
        for kind, cells in longest.items()
        if cells
    ]
    ui.text(f"would fit: {' · '.join(ways)}" if ways else "no context fits: a smaller quantization may (--quant TYPE)")


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    from llmcli.units import size

    return "" if value is None else size(value)


def _difference(value: int | None, actual: int | None) -> str:
    if value is None or actual is None:
        return ""
    share = f" ({(actual - value) / value:+.2%})" if value and actual != value else ""
    return f"{actual - value:+,}{share}" if actual != value else "0"
