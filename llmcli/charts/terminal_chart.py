"""Charts as lines of text for a terminal: no color, and ASCII where Unicode cannot be shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    corner: str
    tick: str
    ellipsis: str


UNICODE_GLYPHS = Glyphs("●■▲◆▼✕○□", "█▒▓░▚═▞─", " ▏▎▍▌▋▊▉█", "·", "│", "─", "└", "┴", "…")
ASCII_GLYPHS = Glyphs("o#^*vx@&", "#=%:+@~-", " #", ".", "|", "-", "+", "+", "~")


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
    points = [point for one in plot.series for point in one.points]
    y = Scale(*axis_limits([p.y for p in points], plot.y.is_log), PLOT_LINES - 1, 0, plot.y.is_log)
    labels = {round(y(value)): name for value, name in _named(y, 5)}
    left = max(map(terminal_columns, labels.values()))
    room = columns - left - 2
    rules = [rule.position for rule in plot.reference_lines]
    x = Scale(
        *axis_limits([*(p.x for p in points), *rules], plot.x.is_log), 0, room - 1, plot.x.is_log
    )
    field = [[" "] * room for _ in range(PLOT_LINES)]
    for rule in plot.reference_lines:
        for line in field:
            line[round(x(rule.position))] = glyphs.vertical
    for one in plot.series:
        if one.line:
            _trace(one.points, x, y, field, glyphs.dot)
    for number, one in enumerate(plot.series):
        for point in one.points if one.marks else ():
            field[round(y(point.y))][round(x(point.x))] = glyphs.marks[number % len(glyphs.marks)]
    for one in plot.series:
        for point in one.points:
            _write(point, x, y, field)
    lines = [fit_columns(plot.y.title, columns, glyphs.ellipsis)]
    lines += [
        f"{labels.get(n, ''):>{left}} {glyphs.vertical}{''.join(line)}"
        for n, line in enumerate(field)
    ]
    base, *below = _across(plot.x, x, room, glyphs)
    lines += [" " * (left + 1) + glyphs.corner + base, *(" " * (left + 2) + line for line in below)]
    shown = [
        f"{glyphs.marks[n % len(glyphs.marks)] if one.marks else glyphs.dot * 2} {one.name}"
        for n, one in enumerate(plot.series)
        if one.name and len(plot.series) > 1
    ]
    return lines + _flow(
        [*shown, *(f"{glyphs.vertical} {rule.label}" for rule in plot.reference_lines)], columns
    )


def _trace(points: Sequence[Point], x: Scale, y: Scale, field: list[list[str]], dot: str) -> None:
    """Draw a straight line between neighboring points."""
    for first, last in pairwise(points):
        x1, y1, x2, y2 = x(first.x), y(first.y), x(last.x), y(last.y)
        count = max(1, round(max(abs(x2 - x1), abs(y2 - y1))))
        for step in range(count + 1):
            field[round(y1 + (y2 - y1) * step / count)][round(x1 + (x2 - x1) * step / count)] = dot


def _write(point: Point, x: Scale, y: Scale, field: list[list[str]]) -> None:
    """Write the label of a point next to its mark if it would cover nothing but lines. The data
    table always contains the label.
    """
    line, at = field[round(y(point.y))], round(x(point.x))
    for words in dict.fromkeys((point.full_label, point.label)):
        size = len(words)
        for start in (at + 2, at - 1 - size) if size and terminal_columns(words) == size else ():
            if (
                start >= 0
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
    return line.replace("±", "+-").replace("…", "~").encode("ascii", "replace").decode()
