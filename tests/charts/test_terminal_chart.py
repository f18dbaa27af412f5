import pytest

from llmcli.charts.chart import (
    Axis,
    ChartRow,
    NamedValue,
    Plot,
    Point,
    ReferenceLine,
    RowChart,
    Series,
)
from llmcli.charts.label_layout import fit_columns, terminal_columns
from llmcli.charts.terminal_chart import render_text


@pytest.mark.parametrize("columns", [24, 31, 40, 57, 80, 100])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(charts, columns, unicode):
    for chart in charts:
        for line in render_text(chart, columns, unicode).split("\n"):
            assert terminal_columns(line) <= columns
            assert unicode or line.isascii()


def test_bars_end_on_an_eighth_of_a_cell():
    chart = RowChart(
        "t",
        "s",
        Axis("x"),
        (ChartRow("a", (NamedValue("v", 32.0),)), ChartRow("b", (NamedValue("v", 12.5),))),
    )
    title, first, second = render_text(chart, 40).split("\n")
    bar_columns = 38
    assert (title, first) == ("t", "a " + "█" * bar_columns)
    assert second == "b " + "█" * 14 + "▉"  # 14.84 cells
    assert render_text(chart, 41, unicode=False).split("\n")[1:] == [
        "a " + "#" * bar_columns,
        "b " + "#" * 15,
    ]


def test_each_segment_of_a_stacked_bar_has_its_own_character(bars):
    lines = render_text(bars, 80, unicode=False).split("\n")
    bar = lines[1]
    assert bar.count("#") > bar.count("%") > bar.count("=") > 0
    assert "# weights" in lines[4]


def test_marks_of_a_row_are_in_the_order_of_their_values(dots):
    row = render_text(dots, 100, unicode=False).split("\n")[1]
    columns = [row.index(mark) for mark in "o#^*"]
    assert columns == sorted(columns)


def test_a_plot_of_rising_values_rises():
    series = Series("", tuple(Point(x, x) for x in range(5)))
    lines = render_text(Plot("t", "s", Axis("x"), Axis("y"), (series,)), 60).split("\n")
    marks = [(line.index("●"), number) for number, line in enumerate(lines) if "●" in line]
    assert len(marks) == 5
    assert marks == sorted(marks, reverse=True)


def test_a_point_with_space_beside_it_has_a_label(plot):
    assert "depth 0" in render_text(plot, 100)


@pytest.mark.parametrize("unicode", [True, False])
def test_a_plot_has_titles_tick_labels_and_a_legend(plot, unicode):
    lines = render_text(plot, 100, unicode).split("\n")
    assert lines[0].startswith("Roof of")
    assert lines[1] == "G operations/s"
    y_numbers = [number for line in lines[2:16] if (number := line[:3].strip())]
    assert y_numbers == ["300", "100", "30", "10"]
    assert {"1", "10", "100"} <= set(lines[17].split())
    assert lines[18].strip() == "operations a byte"
    legend = "\n".join(lines[19:])
    samples = ("·· attainable", "▲ prompt", "│ ridge: 20")
    for sample in samples if unicode else (".. attainable", "^ prompt", "| ridge: 20"):
        assert sample in legend
    mark, end = ("▲", "┤") if unicode else ("^", "+")
    assert mark in lines[4] and lines[2].startswith(f"300{end}")


def test_marks_are_above_their_values_on_the_x_axis():
    series = Series("", (Point(0, 0), Point(50, 10), Point(100, 20)))
    plot = Plot("t", "s", Axis("x"), Axis("y"), (series,))
    for columns in (30, 61, 100):
        lines = render_text(plot, columns).split("\n")
        middle = next(line for line in lines if line.startswith("10┤"))
        axis, numbers = lines[-3:-1]
        ticks = [column for column, cell in enumerate(axis) if cell == "┬"]
        assert numbers.split()[0] == "0" and numbers.split()[-1] == "100"
        assert abs(middle.index("●") - (ticks[0] + ticks[-1]) / 2) <= 0.5
        assert lines[2].index("●") == ticks[-1] == columns - 1


def test_a_reference_line_crosses_the_plot():
    series = Series("", (Point(0, 0), Point(9, 9)))
    plot = Plot("t", "s", Axis("x"), Axis("y"), (series,), (ReferenceLine(4, "limit"),))
    lines = render_text(plot, 60).split("\n")
    column = lines[2].index("│", lines[2].index("┤"))
    assert all(line[column] in "│·" for line in lines[2:16])
    assert lines[16][column] in "┴┼"
    assert lines[-1] == "│ limit"


def test_a_plot_does_not_depend_on_the_terminal_or_on_earlier_plots(plot, monkeypatch):
    straight = Plot("t", "s", Axis("x"), Axis("y"), (Series("", (Point(0, 0), Point(9, 9))),))
    text = render_text(straight, 100)
    render_text(plot, 60)
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "3")
    assert render_text(straight, 100) == text
    assert "\x1b" not in text


def test_wide_letters_take_two_columns():
    assert terminal_columns("模型") == 4
    assert fit_columns("模型ab", 4) == "模… "
    assert fit_columns("ab", 4) == "ab  "
