"""Charts as lines of text for a terminal: no color, and ASCII where Unicode cannot be shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.chart import Axis, Chart, ChartRow, Plot, Point, RowChart
from llmcli.charts.label_layout import fit_columns, terminal_columns
from llmcli.charts.scale import Scale, axis_limits, format_number, format_ticks

MIN_COLUMNS, MAX_COLUMNS, PLOT_LINES = 24, 100, 14  # columns, columns, lines of a plot


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a chart.

    `eighths`: the end of a bar, from empty to a full cell. `parts`: the cells of a stacked bar.
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
    """Return whether a chart compares several values, so that drawing it adds something to a
    table.
    """
    if isinstance(chart, RowChart):
        return chart.draws_marks or len(chart.rows) > 1 or len(chart.value_names) > 1
    return sum(len(series.points) for series in chart.series if series.marks) > 1


def render_text(chart: Chart, columns: int, unicode: bool = True) -> str:
    """Return the chart as text that fits into `columns` columns, with its title first."""
    columns = min(max(columns, MIN_COLUMNS), MAX_COLUMNS)
    glyphs = UNICODE_GLYPHS if unicode else ASCII_GLYPHS
    columns -= not unicode  # a line has at most one ±, which takes two ASCII characters
    lines = (
        _plot(chart, columns, glyphs) if isinstance(chart, Plot) else _rows(chart, columns, glyphs)
    )
    output = [
        line.rstrip() for line in (fit_columns(chart.title, columns, glyphs.ellipsis), *lines)
    ]
    return "\n".join(line if unicode else _ascii(line) for line in output)


def _rows(chart: RowChart, columns: int, glyphs: Glyphs) -> list[str]:
    names = chart.value_names
    label = min(max(terminal_columns(row.label) for row in chart.rows), 2 * columns // 5)
    notes = min(max(terminal_columns(row.note) for row in chart.rows), columns // 3)
    chart_columns = columns - label - 1 - (notes + 1 if notes else 0)
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
            _marks(row, names, scale, chart_columns, glyphs)
            if chart.draws_marks
            else _bar(row, names, scale, glyphs)
        )
        field = list(drawn.ljust(chart_columns))
        for at in {min(round(scale(rule)), chart_columns - 1) for rule in rules}:
            field[at] = glyphs.vertical if field[at] == " " else field[at]
        lines.append(
            f"{fit_columns(row.label, label, glyphs.ellipsis)} {''.join(field)}"
            f" {fit_columns(row.note, notes, glyphs.ellipsis)}"
        )
    if chart.draws_marks:
        lines += [
            " " * (label + 1) + line for line in _across(chart.axis, scale, chart_columns, glyphs)
        ]
    if len(names) > 1:
        samples = glyphs.marks if chart.draws_marks else glyphs.bar_cells
        lines += _flow(
            [f"{samples[n % len(samples)]} {name}" for n, name in enumerate(names)], columns
        )
    return lines + _flow(
        [f"{rule.label}: {format_number(rule.position)}" for rule in chart.reference_lines], columns
    )


def _bar(row: ChartRow, names: Sequence[str], scale: Scale, glyphs: Glyphs) -> str:
    """Draw the parts of a bar one after another. A bar with one part ends on an eighth of a
    cell.
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
            part = glyphs.bar_cells[names.index(named.name) % len(glyphs.bar_cells)]
            drawn += part * (round(scale(total)) - len(drawn))
    return drawn


def _marks(row: ChartRow, names: Sequence[str], scale: Scale, room: int, glyphs: Glyphs) -> str:
    """Draw a mark for each value on a line from the smallest to the largest. If marks share a cell,
    the first one is shown.
    """
    drawn = [" "] * room
    ends = [named.value for named in row.values] + list(row.value_range or ())
    if ends:
        first, last = round(scale(min(ends))), round(scale(max(ends)))
        drawn[first : last + 1] = glyphs.horizontal * (last + 1 - first)
    for named in reversed(row.values):
        drawn[round(scale(named.value))] = glyphs.marks[names.index(named.name) % len(glyphs.marks)]
    return "".join(drawn)


def _plot(plot: Plot, columns: int, glyphs: Glyphs) -> list[str]:
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
        _write(point, line, axis_columns, axis_columns + round(x(point.x) * (canvas_columns - 1)))
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
        *_flow(legend, columns),
    ]


def _draw_canvas(plot: Plot, x: Scale, y: Scale, columns: int, glyphs: Glyphs) -> list[str]:
    """Return the marks, lines and axes of a plot: `PLOT_LINES` lines of text, then the line and
    the numbers of the x axis.
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
            ticks = _named(scale, max_ticks)
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
        # The figure of plotext is global.
        figure.clear()
        plotext.terminal.clear()
    return lines


def _write(point: Point, line: list[str], first: int, at: int) -> None:
    """Write the label of a point next to its mark, at column `first` or later, if it would cover
    nothing but lines. The data table always contains the label.
    """
    for words in dict.fromkeys((point.full_label, point.label)):
        size = len(words)
        for start in (at + 2, at - 1 - size) if size and terminal_columns(words) == size else ():
            if (
                start >= first
                and start + size <= len(line)
                and all(cell in " ·.│|" for cell in line[start : start + size])
            ):
                line[start : start + size] = words
                return


def _across(axis: Axis, scale: Scale, room: int, glyphs: Glyphs) -> list[str]:
    """Draw the x axis: its line, its numbers and its title."""
    axis_line, numbers = [glyphs.horizontal] * room, [" "] * (room + 1)
    next_column = 0
    for value, label in _named(scale, max(2, room // 10)):
        at = round(scale(value))
        axis_line[at] = glyphs.tick
        start = min(max(at - len(label) // 2, 0), room - len(label))
        if start >= next_column:
            numbers[start : start + len(label)] = label
            next_column = start + len(label) + 1
    return [
        "".join(axis_line),
        "".join(numbers).rstrip(),
        fit_columns(axis.title, room, glyphs.ellipsis),
    ]


def _named(scale: Scale, most: int) -> list[tuple[float, str]]:
    values = scale.ticks(most)
    return list(zip(values, format_ticks(values), strict=True))


def _flow(words: Sequence[str], columns: int) -> list[str]:
    """Arrange pieces of text one after another in as many lines as they need."""
    lines: list[str] = []
    for word in words:
        if lines and terminal_columns(lines[-1]) + 3 + terminal_columns(word) <= columns:
            lines[-1] += "   " + word
        else:
            lines.append(fit_columns(word, min(columns, terminal_columns(word))))
    return lines


def _ascii(line: str) -> str:
    return line.translate(ASCII_TEXT).encode("ascii", "replace").decode()
