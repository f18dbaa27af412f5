"""Charts of sweeps: each value's speed relative to the fastest, for each kind of test."""

from collections.abc import Sequence

from llmcli.bench.plots import pairs
from llmcli.bench.plots.pairs import SpeedRatio
from llmcli.bench.plots.speed import test_names
from llmcli.bench.speed import sweep
from llmcli.bench.speed.measure import SpeedResult
from llmcli.charts.chart import RowChart


def build_charts(results: Sequence[SpeedResult]) -> list[RowChart]:
    """Build a chart of ratios with intervals for each kind of test. An interval that includes 1 is
    level with the fastest.
    """
    drawn = []
    for group in sweep.rank_results(results):
        if len(group) == 1:
            continue
        named_entries = zip(group, test_names([entry.result for entry in group]), strict=True)
        ratios = [
            SpeedRatio(
                name,
                entry.comparison.ratio,
                entry.comparison.low,
                entry.comparison.high,
                entry.mark,
            )
            if entry.comparison
            else SpeedRatio(name, 1.0, verdict=entry.mark)
            for entry, name in named_entries
        ]
        title = f"{group[0].result.test.name}: each value beside the fastest"
        says = "A value whose interval includes 1 cannot be distinguished from the fastest."
        drawn.append(pairs.build_chart(title, says, "times the speed of the fastest", ratios))
    return drawn
