"""The HTML report of `llmcli plan`: the memory of each device, and other settings that
would fit.
"""

from typing import TYPE_CHECKING

from llmcli.bench import report_page
from llmcli.bench.plots import memory
from llmcli.charts.chart import Chart, Table
from llmcli.commands.plan.quantized_sizes import QuantizedSize
from llmcli.commands.plan.receipt import CHECKPOINTS_LABEL
from llmcli.planning.dry_runs.memory_plan import MemoryPlan
from llmcli.units import format_size

if TYPE_CHECKING:
    from llmcli.charts.html_page import ReportPage
    from llmcli.commands.plan.alternatives import Alternatives

FITS_LABELS = {True: "fits", False: "does not fit", None: "may fit"}


def build_charts(predicted: MemoryPlan, measured: MemoryPlan | None) -> list[Chart]:
    """Return a chart of the predicted memory, and of the measured memory if there is one."""
    bars = memory.build_chart(
        [("predicted", predicted), *([("loaded", measured)] if measured else [])]
    )
    return [bars] if bars else []


def build_page(
    title: str,
    predicted: MemoryPlan,
    measured: MemoryPlan | None,
    max_checkpoints: int,
    alternatives: "Alternatives",
) -> "ReportPage":
    """Return the HTML report. `max_checkpoints`: the most bytes of checkpoints."""
    longest = ", ".join(
        f"{kind} {_format_count(alternatives.max_contexts[kind])}"
        for kind in alternatives.supported_types
    )
    available = predicted.devices[0].available
    lead = [
        f"It {FITS_LABELS[predicted.fits]}: {_format_count(predicted.sums.total)} bytes, "
        f"{_format_size(available)} available.",
        f"Longest contexts that fit: {longest} tokens.",
    ]
    rows = [
        (quantized_size.type, quantized_size.total_bytes, _fits_label(quantized_size))
        for quantized_size in alternatives.quants
    ]
    types = memory.build_type_chart(
        [(name, total, word) for name, total, word in rows if total is not None], available
    )
    charts = [*build_charts(predicted, measured), *([types] if types else [])]
    return report_page.build_page(
        f"Memory of {title}",
        "Predicted before loading.",
        lead,
        charts,
        (("Bytes", _build_table(predicted, measured, max_checkpoints)),),
    )


def _fits_label(quantized_size: QuantizedSize) -> str:
    if quantized_size.is_present:
        return "this file"
    return FITS_LABELS[quantized_size.fits] + (
        ", needs an imatrix" if quantized_size.needs_imatrix else ""
    )


def _build_table(predicted: MemoryPlan, measured: MemoryPlan | None, max_checkpoints: int) -> Table:
    """Return a table with each kind of memory of each device, in bytes."""
    rows = []
    for share in predicted.devices:
        measured_share = (
            next(
                (candidate for candidate in measured.devices if candidate.device == share.device),
                None,
            )
            if measured
            else None
        )
        for label, read_part in memory.MEMORY_PARTS:
            actual = [_format_count(read_part(measured_share))] if measured_share else []
            rows.append((f"{share.device}: {label}", _format_count(read_part(share)), *actual))
    rows.append(
        (memory.OVERHEAD_LABEL, _format_count(predicted.overhead), *([""] if measured else []))
    )
    rows.append(
        (
            "whole process",
            _format_count(predicted.process_bytes),
            *([_format_count(measured.process_bytes)] if measured else []),
        )
    )
    if max_checkpoints:
        rows.append(
            (CHECKPOINTS_LABEL, _format_count(max_checkpoints), *([""] if measured else []))
        )
    columns = ("part", "bytes predicted", *(["bytes loaded"] if measured else []))
    return Table(columns, tuple(rows), frozenset((1, 2)))


def _format_size(value: int | None) -> str:
    return "unknown" if value is None else format_size(value)


def _format_count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
