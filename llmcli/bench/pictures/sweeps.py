"""A sweep's values beside the fastest of them, each kind of test by itself."""

from collections.abc import Sequence

from llmcli.bench import sweep
from llmcli.bench.charts.chart import Rows
from llmcli.bench.kernel import Result
from llmcli.bench.pictures import pairs
from llmcli.bench.pictures.pairs import Ratio
from llmcli.bench.pictures.speed import names


def charts(results: Sequence[Result]) -> list[Rows]:
    """Ratios below 1 with their intervals; one that reaches 1 is level with the fastest."""
    drawn = []
    for group in sweep.standings(results):
        if len(group) == 1:
            continue
        told = zip(group, names([one.result for one in group]), strict=True)
        ratios = [
            Ratio(name, one.against.ratio, one.against.low, one.against.high, one.mark)
            if one.against
            else Ratio(name, 1.0, words=one.mark)
            for one, name in told
        ]
        title = f"{group[0].result.test.name}: each value beside the fastest"
        says = "An interval that reaches 1 is level with the fastest: the noise does not tell them apart."
        drawn.append(pairs.chart(title, says, "times the speed of the fastest", ratios))
    return drawn
