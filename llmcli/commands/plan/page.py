"""The report page of `llmcli plan`: the memory plan in bytes, and what else would fit."""

from typing import TYPE_CHECKING

from llmcli.bench import report_page
from llmcli.bench.plots import memory
from llmcli.charts.chart import Chart, Table
from llmcli.commands.plan.quantized_sizes import Quant
from llmcli.planning.memory_plan import Receipt
from llmcli.units import size

if TYPE_CHECKING:
    from llmcli.charts.html_page import Page
    from llmcli.commands.plan.alternatives import Others

FITS = {True: "fits", False: "does not fit", None: "may fit"}


def charts(told: Receipt, found: Receipt | None) -> list[Chart]:
    """Return the plan as bars, with the measured memory below it."""
    bars = memory.chart([("predicted", told), *([("loaded", found)] if found else [])])
    return [bars] if bars else []


def made(title: str, told: Receipt, found: Receipt | None, other: "Others") -> "Page":
    """Return the report page."""
    longest = ", ".join(f"{kind} {_format_count(other.longest[kind])}" for kind in other.taken)
    available = told.shares[0].available
    lead = [
        f"It {FITS[told.fits]}: {_format_count(told.sum('total'))} bytes, "
        f"{_format_size(available)} available.",
        f"Longest contexts that fit: {longest} tokens.",
    ]
    rows = [
        (quantized_size.type, quantized_size.total, _fits_label(quantized_size))
        for quantized_size in other.quants
    ]
    types = memory.types(
        [(name, total, word) for name, total, word in rows if total is not None], available
    )
    drawn = [*charts(told, found), *([types] if types else [])]
    return report_page.of_others(
        f"Memory of {title}",
        "Predicted before loading.",
        lead,
        drawn,
        (("Bytes", _build_table(told, found)),),
    )


def _fits_label(one: Quant) -> str:
    if one.here:
        return "this file"
    return FITS[one.fits] + (", needs an imatrix" if one.imatrix else "")


def _build_table(told: Receipt, found: Receipt | None) -> Table:
    """Return the table of every part of every device."""
    rows = []
    for share in told.shares:
        measured_share = (
            next(
                (candidate for candidate in found.shares if candidate.device == share.device), None
            )
            if found
            else None
        )
        for label, part in memory.PARTS:
            actual = [_format_count(getattr(measured_share, part))] if measured_share else []
            rows.append((f"{share.device}: {label}", _format_count(getattr(share, part)), *actual))
    rows.append((memory.OVERHEAD, _format_count(told.overhead), *([""] if found else [])))
    rows.append(
        (
            "whole process",
            _format_count(told.process),
            *([_format_count(found.process)] if found else []),
        )
    )
    columns = ("part", "bytes predicted", *(["bytes loaded"] if found else []))
    return Table(columns, tuple(rows), frozenset((1, 2)))


def _format_size(value: int | None) -> str:
    return "unknown" if value is None else size(value)


def _format_count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
