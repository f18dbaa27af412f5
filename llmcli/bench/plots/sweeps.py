"""Charts of sweeps: each value's speed relative to the fastest, for each kind of test."""

from collections.abc import Sequence

from llmcli.bench.plots import pairs
from llmcli.bench.plots.pairs import Ratio
from llmcli.bench.plots.speed import names
from llmcli.bench.speed import sweep
from llmcli.bench.speed.measure import Result
from llmcli.charts.chart import Rows


def charts(results: Sequence[Result]) -> list[Rows]:
    """Build a chart of ratios with intervals for each kind of test. An interval that includes 1 is
    level with the fastest.
    """
    drawn = []
    for group in sweep.standings(results):
        if len(group) == 1:
            continue
        named_entries = zip(group, names([entry.result for entry in group]), strict=True)
        ratios = [
            Ratio(name, entry.against.ratio, entry.against.low, entry.against.high, entry.mark)
            if entry.against
            else Ratio(name, 1.0, words=entry.mark)
            for entry, name in named_entries
        ]
        title = f"{group[0].result.test.name}: each value beside the fastest"
        says = "A value whose interval includes 1 cannot be distinguished from the fastest."
        drawn.append(pairs.chart(title, says, "times the speed of the fastest", ratios))
    return drawn
