"""The data table below a chart. It contains all values as text, also for screen readers."""

from llmcli.charts.chart import Chart, Plot, RowChart, Table
from llmcli.charts.scale import format_number


def build_data_table(chart: Chart) -> Table:
    """Return a table of all values of a chart."""
    return _plot(chart) if isinstance(chart, Plot) else _rows(chart)


def _plot(plot: Plot) -> Table:
    labelled = any(point.label for series in plot.series for point in series.points)
    rows = [
        (
            series.name,
            format_number(point.x),
            format_number(point.y),
            *([point.full_label] if labelled else []),
        )
        for series in plot.series
        for point in series.points
    ]
    rows += [
        (rule.label, format_number(rule.position), "", *([""] if labelled else []))
        for rule in plot.reference_lines
    ]
    columns = ("", plot.x.title, plot.y.title, *(["what"] if labelled else []))
    return Table(columns, tuple(rows), frozenset((1, 2)))


def _rows(chart: RowChart) -> Table:
    names = chart.value_names
    ranged = any(row.value_range for row in chart.rows)
    # A row with a range has columns for its value and deviation, so its note would repeat them.
    noted = (chart.draws_marks or not ranged) and any(row.note for row in chart.rows)
    rows = []
    for row in chart.rows:
        cells = {named.name: format_number(named.value) for named in row.values}
        span = [format_number(end) for end in row.value_range] if row.value_range else ["", ""]
        extra_cells = (span if ranged else []) + ([row.note] if noted else [])
        rows.append((row.label, *(cells.get(name, "") for name in names), *extra_cells))
    blank = [""] * (len(names) - 1 + 2 * ranged + noted)
    rows += [(rule.label, format_number(rule.position), *blank) for rule in chart.reference_lines]
    first = "" if names == (chart.axis.title,) else chart.axis.title
    columns = (first, *names, *(["from", "to"] if ranged else []), *(["note"] if noted else []))
    return Table(columns, tuple(rows), frozenset(range(1, 1 + len(names) + 2 * ranged)))
