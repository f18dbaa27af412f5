"""A picture's values as a table: what stands below each picture, for those who read numbers or hear
them.
"""

from llmcli.bench.charts.chart import Chart, Plot, Rows, Table
from llmcli.bench.charts.scale import figure


def table(chart: Chart) -> Table:
    """Every value of a chart."""
    return _plot(chart) if isinstance(chart, Plot) else _rows(chart)


def _plot(plot: Plot) -> Table:
    labelled = any(point.label for one in plot.series for point in one.points)
    rows = [
        (one.name, figure(point.x), figure(point.y), *([point.words] if labelled else []))
        for one in plot.series
        for point in one.points
    ]
    rows += [(rule.label, figure(rule.at), "", *([""] if labelled else [])) for rule in plot.rules]
    columns = ("", plot.x.title, plot.y.title, *(["what"] if labelled else []))
    return Table(columns, tuple(rows), frozenset((1, 2)))


def _rows(chart: Rows) -> Table:
    names = chart.names
    ranged = any(row.span for row in chart.rows)
    # Behind a bar with a range stand its value and deviation, which the columns have.
    noted = (chart.dots or not ranged) and any(row.note for row in chart.rows)
    rows = []
    for row in chart.rows:
        found = {one.name: figure(one.value) for one in row.values}
        span = [figure(end) for end in row.span] if row.span else ["", ""]
        more = (span if ranged else []) + ([row.note] if noted else [])
        rows.append((row.label, *(found.get(name, "") for name in names), *more))
    blank = [""] * (len(names) - 1 + 2 * ranged + noted)
    rows += [(rule.label, figure(rule.at), *blank) for rule in chart.rules]
    first = "" if names == (chart.axis.title,) else chart.axis.title
    columns = (first, *names, *(["from", "to"] if ranged else []), *(["note"] if noted else []))
    return Table(columns, tuple(rows), frozenset(range(1, 1 + len(names) + 2 * ranged)))
