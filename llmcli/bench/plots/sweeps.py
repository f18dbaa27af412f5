"""Charts of sweeps, which measure several values of a setting: for each kind of test, the speed of
each value relative to the fastest value.
"""

from collections.abc import Sequence

from llmcli.bench.plots import pairs
from llmcli.bench.plots.pairs import SpeedRatio
from llmcli.bench.plots.speed import test_names
from llmcli.bench.speed import sweep
from llmcli.bench.speed.measure import SpeedResult
from llmcli.charts.chart import RowChart


def build_charts(results: Sequence[SpeedResult]) -> list[RowChart]:
    """Build one chart for each kind of test (pp512, tg128, …), with the speed ratio and interval of
    each value. A value whose interval includes 1 may be as fast as the fastest.
    """
    charts = []
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
        title = f"{group[0].result.test.name}: each value relative to the fastest"
        description = "A value whose interval includes 1 cannot be distinguished from the fastest."
        charts.append(
            pairs.build_chart(title, description, "times the speed of the fastest", ratios)
        )
    return charts
