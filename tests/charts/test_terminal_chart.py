import pytest

from llmcli.charts.chart import Axis, ChartRow, NamedValue, Plot, Point, RowChart, Series
from llmcli.charts.label_layout import fit_columns, terminal_columns
from llmcli.charts.terminal_chart import render_text


@pytest.mark.parametrize("columns", [24, 31, 40, 57, 80, 100])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_longer_than_the_terminal(charts, columns, unicode):
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
    title, full, part = render_text(chart, 40).split("\n")
    room = 38
    assert (title, full) == ("t", "a " + "█" * room)
    assert part == "b " + "█" * 14 + "▉"  # 14.84 cells
    assert render_text(chart, 41, unicode=False).split("\n")[1:] == [
        "a " + "#" * room,
        "b " + "#" * 15,
    ]


def test_parts_of_a_stack_have_letters_of_their_own(bars):
    lines = render_text(bars, 80, unicode=False).split("\n")
    first = lines[1]
    assert first.count("#") > first.count("%") > first.count("=") > 0
    assert "# weights" in lines[4]


def test_percentiles_stand_in_their_order(dots):
    row = render_text(dots, 100, unicode=False).split("\n")[1]
    places = [row.index(letter) for letter in "o#^*"]
    assert places == sorted(places)


def test_a_plot_rises_where_its_values_do():
    series = Series("", tuple(Point(x, x) for x in range(5)))
    lines = render_text(Plot("t", "s", Axis("x"), Axis("y"), (series,)), 60).split("\n")
    marks = [(line.index("●"), number) for number, line in enumerate(lines) if "●" in line]
    assert len(marks) == 5
    assert marks == sorted(marks, reverse=True)


def test_labels_stand_where_there_is_room(plot):
    assert "depth 0" in render_text(plot, 100)


def test_wide_letters_take_two_columns():
    assert terminal_columns("模型") == 4
    assert fit_columns("模型ab", 4) == "模… "
    assert fit_columns("ab", 4) == "ab  "
