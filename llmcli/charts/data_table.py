"""Makes the data table of a chart. The HTML page shows it below the picture, so that every value
can be read exactly, also with a screen reader.
"""

from llmcli.charts.chart import Chart, Plot, RowChart, Table
from llmcli.charts.scale import format_number


def build_data_table(chart: Chart) -> Table:
    """Return a table of all values and labels of a chart."""
    return _plot_table(chart) if isinstance(chart, Plot) else _row_chart_table(chart)


def _plot_table(plot: Plot) -> Table:
    """Return a table with one row for each point and each reference line. Its columns are the name
    of the series, x, y and, if any point has a label, the label.
    """
    has_labels = any(point.label for series in plot.series for point in series.points)
    rows = [
        (
            series.name,
            format_number(point.x),
            format_number(point.y),
            *([point.full_label] if has_labels else []),
        )
        for series in plot.series
        for point in series.points
    ]
    rows += [
        (rule.label, format_number(rule.position), "", *([""] if has_labels else []))
        for rule in plot.reference_lines
    ]
    columns = ("", plot.x.title, plot.y.title, *(["what"] if has_labels else []))
    return Table(columns, tuple(rows), frozenset((1, 2)))


def _row_chart_table(chart: RowChart) -> Table:
    """Return a table with one row for each row and each reference line of the chart. Its columns
    are the label, one column for each value name and, if any row has these, the two ends of the
    range, and the note.
    """
    names = chart.value_names
    has_ranges = any(row.value_range for row in chart.rows)
    # The note of a bar with a range is the value and the deviation, which have columns already.
    has_notes = (chart.draws_marks or not has_ranges) and any(row.note for row in chart.rows)
    rows = []
    for row in chart.rows:
        cells = {named.name: format_number(named.value) for named in row.values}
        ends = [format_number(end) for end in row.value_range] if row.value_range else ["", ""]
        extra_cells = (ends if has_ranges else []) + ([row.note] if has_notes else [])
        rows.append((row.label, *(cells.get(name, "") for name in names), *extra_cells))
    blank = [""] * (len(names) - 1 + 2 * has_ranges + has_notes)
    rows += [(rule.label, format_number(rule.position), *blank) for rule in chart.reference_lines]
    first = "" if names == (chart.axis.title,) else chart.axis.title
    columns = (
        first,
        *names,
        *(["from", "to"] if has_ranges else []),
        *(["note"] if has_notes else []),
    )
    return Table(columns, tuple(rows), frozenset(range(1, 1 + len(names) + 2 * has_ranges)))
