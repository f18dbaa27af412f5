"""The page of `llmcli plan --report`: the receipt, exact to the byte, and what else would fit."""

from typing import TYPE_CHECKING

from llmcli.bench import page
from llmcli.bench.charts.chart import Chart, Table
from llmcli.bench.pictures import memory
from llmcli.commands.quants import Quant
from llmcli.hardware.plan import Receipt
from llmcli.units import size

if TYPE_CHECKING:
    from llmcli.bench.charts.page import Page
    from llmcli.commands.others import Others

FITS = {True: "fits", False: "does not fit", None: "may fit"}


def charts(told: Receipt, found: Receipt | None) -> list[Chart]:
    """The receipt as bars, and what was measured below it."""
    drawn = memory.chart([("predicted", told), *([("loaded", found)] if found else [])])
    return [drawn] if drawn else []


def made(title: str, told: Receipt, found: Receipt | None, other: "Others") -> "Page":
    """The whole page."""
    longest = ", ".join(f"{kind} {_count(other.longest[kind])}" for kind in other.taken)
    room = told.shares[0].available
    lead = [
        f"It {FITS[told.fits]}: {_count(told.sum('total'))} bytes, {_size(room)} available.",
        f"Longest contexts that fit: {longest} tokens.",
    ]
    rows = [(one.type, one.total, _word(one)) for one in other.quants]
    types = memory.types(
        [(name, total, word) for name, total, word in rows if total is not None], room
    )
    drawn = [*charts(told, found), *([types] if types else [])]
    return page.of_others(
        f"Memory of {title}",
        "Predicted before loading.",
        lead,
        drawn,
        (("Bytes", _table(told, found)),),
    )


def _word(one: Quant) -> str:
    if one.here:
        return "this file"
    return FITS[one.fits] + (", needs an imatrix" if one.imatrix else "")


def _table(told: Receipt, found: Receipt | None) -> Table:
    """Every part of every device."""
    rows = []
    for share in told.shares:
        other = (
            next((one for one in found.shares if one.device == share.device), None)
            if found
            else None
        )
        for label, part in memory.PARTS:
            actual = [_count(getattr(other, part))] if other else []
            rows.append((f"{share.device}: {label}", _count(getattr(share, part)), *actual))
    rows.append((memory.OVERHEAD, _count(told.overhead), *([""] if found else [])))
    rows.append(
        ("the whole process", _count(told.process), *([_count(found.process)] if found else []))
    )
    columns = ("part", "bytes predicted", *(["bytes loaded"] if found else []))
    return Table(columns, tuple(rows), frozenset((1, 2)))


def _size(value: int | None) -> str:
    return "unknown" if value is None else size(value)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
