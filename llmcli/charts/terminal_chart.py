"""Draws charts as lines of text for a terminal, without color. ASCII characters replace Unicode
characters if the terminal cannot show these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.chart import Axis, Chart, ChartRow, Plot, Point, RowChart
from llmcli.charts.label_layout import fit_columns, terminal_columns
from llmcli.charts.scale import Scale, axis_limits, format_number, format_ticks

MIN_COLUMNS, MAX_COLUMNS = 24, 100  # width of a chart
PLOT_LINES = 14  # height of a plot without its x axis


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters with which a chart is drawn.

    - `marks`: the mark of each series or value name.
    - `bar_cells`: a full cell of each segment of a stacked bar.
    - `eighths`: characters for the last cell of a bar, from an empty to a full cell.
    - `dot`: a cell of the line of a series.
    """

    marks: str
    bar_cells: str
    eighths: str
    dot: str
    vertical: str
    horizontal: str
    tick: str
    ellipsis: str


UNICODE_GLYPHS = Glyphs("●■▲◆▼✕○□", "█▒▓░▚═▞─", " ▏▎▍▌▋▊▉█", "·", "│", "─", "┴", "…")
ASCII_GLYPHS = Glyphs("o#^*vx@&", "#=%:+@~-", " #", ".", "|", "-", "+", "~")
ASCII_TEXT = str.maketrans("│─└┘┌┐├┤┬┴┼…", "|-+++++++++~") | {ord("±"): "+-"}


def compares_values(chart: Chart) -> bool:
    """Return whether a chart has at least two values to compare. A chart of a single value is not
    worth drawing in addition to a table.
    """
    if isinstance(chart, RowChart):
        return chart.draws_marks or len(chart.rows) > 1 or len(chart.value_names) > 1
    return sum(len(series.points) for series in chart.series if series.marks) > 1


def render_text(chart: Chart, columns: int, unicode: bool = True) -> str:
    """Return the chart as lines of text, with its title first. `columns`: width of the terminal.
    `unicode`: whether the terminal shows Unicode; if False, the text is ASCII.
    """
    columns = min(max(columns, MIN_COLUMNS), MAX_COLUMNS)
    glyphs = UNICODE_GLYPHS if unicode else ASCII_GLYPHS
    columns -= not unicode  # a line has at most one ±, which takes two ASCII characters
    lines = (
        _plot_lines(chart, columns, glyphs)
        if isinstance(chart, Plot)
        else _row_chart_lines(chart, columns, glyphs)
    )
    output = [
        line.rstrip() for line in (fit_columns(chart.title, columns, glyphs.ellipsis), *lines)
    ]
    return "\n".join(line if unicode else _ascii(line) for line in output)


def _row_chart_lines(chart: RowChart, columns: int, glyphs: Glyphs) -> list[str]:
    """Draw a row chart: one line for each row with its label, bar or marks, and note; then the x
    axis if rows are marks; then the legend.
    """
    names = chart.value_names
    label_columns = min(max(terminal_columns(row.label) for row in chart.rows), 2 * columns // 5)
    note_columns = min(max(terminal_columns(row.note) for row in chart.rows), columns // 3)
    chart_columns = columns - label_columns - 1 - (note_columns + 1 if note_columns else 0)
    rules = [rule.position for rule in chart.reference_lines]
    low, high = (
        axis_limits(chart.axis_values, chart.axis.is_log, chart.axis.from_zero)
        if chart.draws_marks
        else (0.0, max(chart.axis_values) or 1.0)
    )
    scale = Scale(
        low, high, 0, chart_columns - 1 if chart.draws_marks else chart_columns, chart.axis.is_log
    )
    lines = []
    for row in chart.rows:
        drawn = (
            _draw_marks(row, names, scale, chart_columns, glyphs)
            if chart.draws_marks
            else _draw_bar(row, names, scale, glyphs)
        )
        cells = list(drawn.ljust(chart_columns))
        for column in {min(round(scale(rule)), chart_columns - 1) for rule in rules}:
            cells[column] = glyphs.vertical if cells[column] == " " else cells[column]
        lines.append(
            f"{fit_columns(row.label, label_columns, glyphs.ellipsis)} {''.join(cells)}"
            f" {fit_columns(row.note, note_columns, glyphs.ellipsis)}"
        )
    if chart.draws_marks:
        lines += [
            " " * (label_columns + 1) + line
            for line in _draw_x_axis(chart.axis, scale, chart_columns, glyphs)
        ]
    if len(names) > 1:
        samples = glyphs.marks if chart.draws_marks else glyphs.bar_cells
        lines += _wrap(
            [f"{samples[n % len(samples)]} {name}" for n, name in enumerate(names)], columns
        )
    return lines + _wrap(
        [f"{rule.label}: {format_number(rule.position)}" for rule in chart.reference_lines], columns
    )


def _draw_bar(row: ChartRow, names: Sequence[str], scale: Scale, glyphs: Glyphs) -> str:
    """Draw a row as a bar. Segments of a stacked bar are rounded to full cells. If the chart has
    only one value name, the length is rounded to an eighth of a cell.
    """
    drawn, total = "", 0.0
    for named in row.values:
        total += named.value
        if len(names) == 1:
            steps = len(glyphs.eighths) - 1
            eighths = max(round(scale(total) * steps), 1 if total else 0)
            drawn = (
                glyphs.eighths[-1] * (eighths // steps) + glyphs.eighths[eighths % steps].strip()
            )
        else:
            cell = glyphs.bar_cells[names.index(named.name) % len(glyphs.bar_cells)]
            drawn += cell * (round(scale(total)) - len(drawn))
    return drawn


def _draw_marks(
    row: ChartRow, names: Sequence[str], scale: Scale, columns: int, glyphs: Glyphs
) -> str:
    """Draw a row as a mark for each value, on a line from the smallest to the largest number of the
    values and the range. If several marks fall into one cell, the cell shows the first of them.
    """
    drawn = [" "] * columns
    ends = [named.value for named in row.values] + list(row.value_range or ())
    if ends:
        first, last = round(scale(min(ends))), round(scale(max(ends)))
        drawn[first : last + 1] = glyphs.horizontal * (last + 1 - first)
    for named in reversed(row.values):
        drawn[round(scale(named.value))] = glyphs.marks[names.index(named.name) % len(glyphs.marks)]
    return "".join(drawn)


def _plot_lines(plot: Plot, columns: int, glyphs: Glyphs) -> list[str]:
    """Draw a plot: the title of the y axis, the canvas, the x axis and the legend."""
    points = [point for series in plot.series for point in series.points]
    rules = [rule.position for rule in plot.reference_lines]
    # Positions from 0 to 1: plotext ignores the limits of a logarithmic axis that has named ticks.
    x = Scale(*axis_limits([*(p.x for p in points), *rules], plot.x.is_log), 0, 1, plot.x.is_log)
    y = Scale(*axis_limits([p.y for p in points], plot.y.is_log), 0, 1, plot.y.is_log)
    drawn = _draw_canvas(plot, x, y, columns, glyphs)
    axis_columns = drawn[PLOT_LINES].index("└") + 1
    canvas_columns = columns - axis_columns
    canvas = [list(line) for line in drawn[:PLOT_LINES]]
    for point in points:
        line = canvas[round((1 - y(point.y)) * (PLOT_LINES - 1))]
        column = axis_columns + round(x(point.x) * (canvas_columns - 1))
        _write_label(point, line, axis_columns, column)
    legend = [
        f"{glyphs.marks[n % len(glyphs.marks)] if series.marks else glyphs.dot * 2} {series.name}"
        for n, series in enumerate(plot.series)
        if series.name and len(plot.series) > 1
    ]
    legend += [f"{glyphs.vertical} {rule.label}" for rule in plot.reference_lines]
    return [
        fit_columns(plot.y.title, columns, glyphs.ellipsis),
        *map("".join, canvas),
        *drawn[PLOT_LINES:],
        " " * axis_columns + fit_columns(plot.x.title, canvas_columns, glyphs.ellipsis),
        *_wrap(legend, columns),
    ]


def _draw_canvas(plot: Plot, x: Scale, y: Scale, columns: int, glyphs: Glyphs) -> list[str]:
    """Draw the marks, lines and axes of a plot with plotext. Return PLOT_LINES lines of text, and
    two more with the line and the numbers of the x axis. `x`, `y`: scales to positions from 0 to 1.
    """
    import plotext

    figure = plotext.figure
    try:
        plotext.terminal.limit(False, False)
        figure.clear()
        figure.plot_size(columns, PLOT_LINES + 2)
        for axis, bare_side, scale, max_ticks in (
            ("x", "upper", x, max(2, columns // 10)),
            ("y", "right", y, 5),
        ):
            figure.axes(False, axis=axis, side=bare_side)
            ticks = _labelled_ticks(scale, max_ticks)
            ruler = figure.ruler(axis)
            ruler.lim(0, 1)
            ruler.ticks([scale(value) for value, _ in ticks], [name for _, name in ticks])
        for rule in plot.reference_lines:
            figure.line(x(rule.position), "vertical")
        shapes = [(series.points, glyphs.dot, True) for series in plot.series if series.line] + [
            (series.points, glyphs.marks[number % len(glyphs.marks)], False)
            for number, series in enumerate(plot.series)
            if series.marks
        ]
        for points, marker, is_line in shapes:
            signal = figure.signal(
                [x(point.x) for point in points], [y(point.y) for point in points], marker=marker
            )
            figure.draw(signal.lines(is_line))
        lines: list[str] = figure.build().string(colorless=True).splitlines()
    finally:
        # The figure of plotext is global, so the next chart would contain the lines of this one.
        figure.clear()
        plotext.terminal.clear()
    return lines


def _write_label(point: Point, line: list[str], first_column: int, column: int) -> None:
    """Write the label of a point into `line`, the cells of its line of text, right or left of its
    mark in `column`. Do nothing if the label would cover anything but lines, or would begin before
    `first_column`.
    """
    for text in dict.fromkeys((point.full_label, point.label)):
        size = len(text)
        if not size or terminal_columns(text) != size:
            continue
        for start in (column + 2, column - 1 - size):
            if (
                start >= first_column
                and start + size <= len(line)
                and all(cell in " ·.│|" for cell in line[start : start + size])
            ):
                line[start : start + size] = text
                return


def _draw_x_axis(axis: Axis, scale: Scale, columns: int, glyphs: Glyphs) -> list[str]:
    """Return three lines of text: the line of the x axis, its numbers and its title."""
    axis_line, numbers = [glyphs.horizontal] * columns, [" "] * (columns + 1)
    next_column = 0
    for value, label in _labelled_ticks(scale, max(2, columns // 10)):
        column = round(scale(value))
        axis_line[column] = glyphs.tick
        start = min(max(column - len(label) // 2, 0), columns - len(label))
        if start >= next_column:
            numbers[start : start + len(label)] = label
            next_column = start + len(label) + 1
    return [
        "".join(axis_line),
        "".join(numbers).rstrip(),
        fit_columns(axis.title, columns, glyphs.ellipsis),
    ]


def _labelled_ticks(scale: Scale, max_ticks: int) -> list[tuple[float, str]]:
    """Return the value and the text of each tick."""
    values = scale.ticks(max_ticks)
    return list(zip(values, format_ticks(values), strict=True))


def _wrap(entries: Sequence[str], columns: int) -> list[str]:
    """Return lines that contain the entries of a legend, three spaces apart. An entry is never
    split between two lines.
    """
    lines: list[str] = []
    for entry in entries:
        if lines and terminal_columns(lines[-1]) + 3 + terminal_columns(entry) <= columns:
            lines[-1] += "   " + entry
        else:
            lines.append(fit_columns(entry, min(columns, terminal_columns(entry))))
    return lines


def _ascii(line: str) -> str:
    """Replace Unicode glyphs by ASCII characters, and all other characters beyond ASCII by "?"."""
    return line.translate(ASCII_TEXT).encode("ascii", "replace").decode()
