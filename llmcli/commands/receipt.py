"""A receipt as people read it (`llmcli plan`): tables and lines. What is in it is
hardware/plan.py's.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmcli.hardware.plan import Receipt
    from llmcli.runtime.binding.context import ContextOptions
    from llmcli.runtime.kv import KVCache, LayerKV
    from llmcli.ui import UI
    from quant.container import Header

PARTS = (
    ("weights", "weights"),
    ("weights in another layout", "repacked"),
    ("KV cache", "kv"),
    ("compute buffers", "compute"),
    ("output buffer", "output"),
)


def title(name: str, header: "Header", options: "ContextOptions", receipt: "Receipt") -> str:
    """What is planned, in a line."""
    slots = options.n_seq_max
    pool = (
        ""
        if slots == 1
        else f" for {slots} sequences, " + ("one pool" if options.unified else "a part for each")
    )
    types = f"K {options.type_k}, V {options.type_v}"
    return f"{name} · {header.file_type} · {receipt.n_ctx} tokens of context{pool} · {types}"


def table(told: "Receipt", found: "Receipt | None", ui: "UI") -> None:
    """The receipt line by line; with `found` what was really taken beside it, and the difference."""
    several = len(told.shares) > 1
    rows: list[tuple[str, int | None, int | None]] = []
    for share in told.shares:
        other = (
            next((one for one in found.shares if one.device == share.device), None)
            if found
            else None
        )
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
        (
            label,
            _bytes(value),
            _size(value),
            "" if actual is None else _bytes(actual),
            _difference(value, actual),
        )
        for label, value, actual in rows
    ]
    ui.table(columns, [row[: len(columns)] for row in cells], right=columns[1:])
    ui.text()
    if told.draft is not None:
        ui.text(f"the draft model takes {_size(told.draft)} of it")
    for share in told.shares:
        _verdict(share, f"{share.device}: " if several else "", ui)
    if told.fits is False and told.runs:
        ui.text(
            "it would run, at the speed of the disk: the weights are read from the file again and again"
        )


def _verdict(share: Any, on: str, ui: "UI") -> None:
    """Whether a device can hold its share, and what of it need not stay."""
    answer = {True: "it fits", False: "it does not fit", None: "whether it fits is unknown"}[
        share.fits
    ]
    if share.droppable:
        ui.text(
            f"{on}{_size(share.droppable)} of the file are read once: under pressure the kernel drops them"
        )
    room = "unknown memory is" if share.available is None else f"{_size(share.available)} are"
    ui.text(f"{on}{room} available: {answer}")


def outside(told: "Receipt", slots: int) -> int:
    """The most bytes that serve and batch take beside the pool for so many answers at once, out of
    what stays free.
    """
    from llmcli.hardware import fit

    return 2 * fit.outside(told.shares[0].left) if slots > 1 else 0


def apart(header: "Header", options: "ContextOptions", gpu_layers: int) -> int | None:
    """Bytes of the context in which serve and batch read prompts, its cache and its buffers; None:
    not known.
    """
    from llmcli.hardware.plan import planner

    with planner(header, options, gpu_layers) as held:
        told = held.receipt()
    return sum_of(told.sum(part) for part in ("kv", "compute", "output"))


def scored(header: "Header", options: "ContextOptions", gpu_layers: int, slots: int) -> int | None:
    """Bytes by which serve and batch give a context larger buffers for so many answers at once, so
    that a pass may score a prompt's tokens: compute's from the start, the logits' once they are
    asked for; None: not known.
    """
    from llmcli.hardware import fit
    from llmcli.hardware.plan import MOST_CELLS, planner

    rows = fit.scored(header) if slots > 1 else 0
    if not rows:
        return 0
    if options.n_ctx > MOST_CELLS:
        return None
    with planner(header, options, gpu_layers) as held:
        without, having = (
            sum_of(part for share in held.shares(one) for part in (share.compute, share.output))
            for one in (options, replace(options, n_outputs=max(options.n_outputs, rows + slots)))
        )
    return None if without is None or having is None else having - without


def sum_of(parts: "Iterable[int | None]") -> int | None:
    """None where one of them is."""
    found = list(parts)
    return None if None in found else sum(one for one in found if one)


def beside(told: "Receipt", slots: int, reading: int | None, scored: int | None, ui: "UI") -> None:
    """The same in words; nothing for one answer."""
    if reading != 0:
        more = "an unknown number of bytes" if reading is None else _size(reading)
        ui.text(
            f"serve and batch read prompts in a context of their own, {more} more: -fa on does without"
        )
    if scored != 0:
        more = "an unknown number of bytes" if scored is None else _size(scored)
        ui.text(
            f"serve's and batch's buffers take up to {more} more, where prompts are scored (echo and logprobs)"
        )
    if slots > 1:
        most = _size(outside(told, slots))
        ui.text(
            f"serve and batch keep up to {most} more of what is free: answers that gave way, and finished ones"
        )


def weights(types: dict[str, dict[str, int]], ui: "UI") -> None:
    """What the weights are stored as, on each device."""
    for device, found in types.items():
        on = f" on {device}" if len(types) > 1 else ""
        rows = sorted(found.items(), key=lambda row: -row[1])
        ui.text(f"weights{on} by type: " + ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in rows))


def layers(cache: "KVCache | None", ui: "UI") -> None:
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
