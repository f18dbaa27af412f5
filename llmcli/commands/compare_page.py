"""The page of `llmcli bench compare --report`: each test's ratio with its interval, and the speeds
of both sides.
"""

import math
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from llmcli.bench import page
from llmcli.bench.charts.chart import Axis, Chart, Row, Rows, Value
from llmcli.bench.charts.scale import figure
from llmcli.bench.pictures import pairs
from llmcli.bench.pictures.pairs import Ratio
from llmcli.commands import comparing, reporting

if TYPE_CHECKING:
    from llmcli.bench.charts.page import Page
    from llmcli.bench.paired import Comparison
    from llmcli.commands.comparing import Told
    from llmcli.ui import UI


def tell(told: "Told", how: tuple[Path | None, bool | None], ui: "UI") -> None:
    """Print what was compared, then its pictures; `how` is what --report and --chart said."""
    if ui.json:
        ui.result(comparing.document(told))
    else:
        comparing.tell(told, ui)
    reporting.show(lambda: made(told), lambda: charts(told)[:1], how, ui)


def charts(told: "Told") -> list[Chart]:
    """Ratios around 1, and tokens a second."""
    both = list(zip(told.tests, told.found, strict=True))
    ratios = [Ratio(name, one.ratio, one.low, one.high, _words(one)) for name, one in both]
    apart = sum(one.differs for one in told.found)
    sure = f"{told.design.confidence:.4g}".rstrip("0")
    says = f"The noise supports a difference in {apart} of {len(ratios)}; all intervals hold with probability {sure}."
    rows = [
        Row(
            f"{name}, {side}",
            (Value("tokens a second", median(rates)),),
            figure(median(rates)),
            _tenths(rates),
        )
        for name, one in both
        for side, rates in (("A", one.a), ("B", one.b))
    ]
    sides = "The median of each side; whiskers from its slowest tenth to its fastest."
    return [
        pairs.chart("B in units of A", says, "B / A", ratios),
        Rows("Tokens a second", sides, Axis("tokens a second"), tuple(rows)),
    ]


def _words(one: "Comparison") -> str:
    """The ratio and what it means, short enough to stand behind it."""
    if math.isinf(one.resolution):
        return "too few pairs"
    return f"{one.ratio:.3f}" + (
        ", level" if not one.differs else ", faster" if one.ratio > 1 else ", slower"
    )


def made(told: "Told") -> "Page":
    """The whole page."""
    how = (
        "Measured in pairs, in random order."
        if told.interleaved
        else "Saved runs: they were not interleaved."
    )
    lead = [f"{name}: {one.words()}" for name, one in zip(told.tests, told.found, strict=True)]
    about = f"A is {told.a.path}, B {told.b.path}. {how}"
    return page.of_others(f"{told.a.words} or {told.b.words}", about, lead, charts(told))


def _tenths(rates: tuple[float, ...]) -> tuple[float, float] | None:
    """Where the slowest tenth ends and the fastest begins."""
    found, cut = sorted(rates), len(rates) // 10
    return (found[cut], found[-1 - cut]) if len(found) > 1 else None
