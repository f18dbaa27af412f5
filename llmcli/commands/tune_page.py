"""The page of `llmcli bench tune --report`: what was tried, and what came of it."""

from typing import TYPE_CHECKING

from llmcli.bench import page
from llmcli.bench.charts.chart import Chart
from llmcli.bench.pictures import pairs
from llmcli.bench.pictures.pairs import Ratio

if TYPE_CHECKING:
    from llmcli.bench.charts.page import Page
    from llmcli.bench.tune import Found, Tried

NAMES = {"threads_batch": "threads of a prompt", "mode": "flash attention"}


def value(one: "Tried") -> str:
    """What was tried of an option."""
    mode = f"{one.setting.flash}, KV {one.setting.cache}"
    return mode if one.option == "mode" else str(getattr(one.setting, one.option))


def charts(found: "Found") -> list[Chart]:
    """The best beside the defaults, if it is another; and every value beside what was best before
    it.
    """
    told = found.comparison
    drawn: list[Chart] = []
    if told is not None:
        best = Ratio("the best", told.ratio, told.low, told.high, f"{told.ratio:.3f}")
        says = (
            "The noise supports that it is faster." if found.faster else "The defaults are as fast."
        )
        says += f" Measured anew, in {len(told.a)} pairs."
        drawn.append(
            pairs.chart(
                "The best in units of the defaults", says, "times the defaults' speed", [best]
            )
        )
    tried = [
        Ratio(
            f"{NAMES.get(one.option, one.option)} {value(one)}",
            one.ratio,
            words="taken" if one.taken else "",
        )
        for one in found.tried
    ]
    if tried:
        says = "Each value beside what was best before it; the search measures few rounds of most."
        drawn.append(pairs.chart("What was tried", says, "times what was best before", tried))
    return drawn


def made(name: str, verdict: str, found: "Found") -> "Page":
    """The whole page."""
    about = f"{found.seconds:.0f} seconds of measuring"
    return page.of_others(f"The fastest settings of {name}", about, [verdict], charts(found))
