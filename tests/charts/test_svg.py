"""The SVG pictures of charts: their content, that everything is inside the picture, and that labels
do not overlap.
"""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest

from llmcli.charts.chart import Axis, ChartRow, NamedValue, Plot, Point, RowChart, Series
from llmcli.charts.label_layout import Box, text_width
from llmcli.charts.markup import escape
from llmcli.charts.svg import NARROW_PIXELS, WIDE_PIXELS, draw_chart
from llmcli.charts.terminal_chart import render_text
from tests.fixtures.charts import DRAWN, HOSTILE

NS = "{http://www.w3.org/2000/svg}"


def parse_chart(chart, width=WIDE_PIXELS):
    return ElementTree.fromstring(draw_chart(chart, width, "a"))


def text_contents(tree) -> list[str]:
    return [element.text or "" for element in tree.iter(f"{NS}text")]


def label_boxes(tree) -> list[Box]:
    """Return the boxes of the labels of a plot's points."""
    boxes = []
    for element in tree.iter(f"{NS}text"):
        if element.get("class") == "label":
            x, y, width = float(element.get("x")), float(element.get("y")), text_width(element.text)
            boxes.append(Box(x, y - 12, x + width, y + 4))
    return boxes


@pytest.mark.parametrize("width", [NARROW_PIXELS, WIDE_PIXELS])
def test_a_picture_is_xml_with_texts_for_screen_readers(charts, width):
    for chart in charts:
        tree = parse_chart(chart, width)
        title, desc = tree.find(f"{NS}title"), tree.find(f"{NS}desc")
        assert tree.get("role") == "img"
        assert tree.get("aria-labelledby").split() == [title.get("id"), desc.get("id")]
        assert (escape(title.text), desc.text) == (escape(chart.title), "what it says")
        assert {element.tag for element in tree.iter()} <= {NS + name for name in DRAWN}
        names = {key for element in tree.iter() for key in element.attrib}
        assert not {name for name in names if name.startswith("on") or name in ("style", "href")}


def test_hostile_names_are_escaped(charts):
    for chart in charts:
        markup = draw_chart(chart)
        assert "<script" not in markup
        assert not set("\x1b\x07\u202e\ud800") & set(markup)
        markup.encode()
        text = "".join(text_contents(ElementTree.fromstring(markup)))
        assert '<script>alert("1")</script>' in text


@pytest.mark.parametrize("width", [NARROW_PIXELS, WIDE_PIXELS])
def test_texts_and_bars_are_inside_the_picture(charts, width):
    for chart in charts:
        tree = parse_chart(chart, width)
        height = float(tree.get("height"))
        for element in tree.iter(f"{NS}text"):
            x, y, size = element.get("x"), float(element.get("y")), text_width(element.text or "")
            left = float(x) - {"end": size, "middle": size / 2}.get(element.get("text-anchor"), 0)
            assert left >= -0.5, element.text
            assert left + size <= width + 0.5, element.text
            assert -6 <= y <= height
        for element in tree.iter(f"{NS}rect"):
            if element.get("class") == "part":
                assert float(element.get("x")) + float(element.get("width")) <= width


@pytest.mark.parametrize("width", [NARROW_PIXELS, WIDE_PIXELS])
def test_labels_do_not_overlap(width):
    points = tuple(
        Point(2 + n / 50, 15 + n / 3, f"depth {512 * n}", f"{200 - n} tok/s") for n in range(6)
    )
    tree = parse_chart(
        Plot("t", "s", Axis("x", True), Axis("y", True), (Series("", points, line=False),)), width
    )
    boxes = label_boxes(tree)
    assert len(boxes) >= 4
    assert not any(first.overlap_area(second) for first, second in combinations(boxes, 2))


def test_a_label_is_next_to_its_own_mark_or_connected_by_a_line():
    points = tuple(Point(x, 10.0, f"test {x}", "123.4 tok/s") for x in (1.0, 1.2, 1.5, 2.0, 4.0))
    tree = parse_chart(
        Plot("t", "s", Axis("x", True), Axis("y"), (Series("", points, line=False),)), NARROW_PIXELS
    )
    marks = {
        point.label: float(element.get("cx"))
        for point, element in zip(points, tree.iter(f"{NS}circle"), strict=True)
    }
    leader_xs = {
        float(element.get("x1"))
        for element in tree.iter(f"{NS}line")
        if element.get("class") == "lead"
    }
    labels = [element for element in tree.iter(f"{NS}text") if element.get("class") == "label"]
    assert len(labels) >= 3
    for label, box in zip(labels, label_boxes(tree), strict=True):
        mark_x = marks[label.text.partition(":")[0]]
        gaps = {x: max(box.x_min - x, x - box.x_max, 0) for x in marks.values()}
        assert gaps[mark_x] == min(gaps.values()) or any(
            abs(mark_x - leader_x) < 0.1 for leader_x in leader_xs
        )


def test_marks_of_a_log_log_plot_are_at_equal_distances_for_equal_ratios():
    points = tuple(Point(x, y) for x, y in ((1, 1), (10, 10), (100, 100)))
    tree = parse_chart(
        Plot("t", "s", Axis("x", True), Axis("y", True), (Series("", points, line=False),))
    )
    (x1, y1), (x2, y2), (x3, y3) = (
        (float(element.get("cx")), float(element.get("cy"))) for element in tree.iter(f"{NS}circle")
    )
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.1) and x2 > x1
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.1) and y2 < y1


def test_bar_segments_are_as_long_as_their_values(bars):
    segments = [
        element
        for element in parse_chart(bars).iter(f"{NS}rect")
        if element.get("class") == "part" and element.get("height") == "14"
    ]
    lengths = [float(element.get("width")) for element in segments]
    values = [value.value for row in bars.rows for value in row.values]
    scale = lengths[0] / values[0]
    assert lengths == pytest.approx([max(value * scale, 0.75) for value in values], abs=0.1)


def test_series_and_bar_segments_differ_not_only_in_color():
    series = tuple(Series(f"s{n}", (Point(0, n), Point(1, n + 1))) for n in range(6))
    tree = parse_chart(Plot("t", "s", Axis("x"), Axis("y"), series))
    lines = [
        element
        for element in tree.iter(f"{NS}path")
        if (element.get("class") or "").startswith("line ")
    ]
    assert len({element.get("stroke-dasharray") for element in lines}) == 6
    shapes = {
        (element.tag, re.sub(r"[\d. -]+", "", element.get("d", "")))
        for element in tree.iter()
        if (element.get("class") or "").startswith("mark ")
    }
    assert len(shapes) >= 4
    stack = RowChart(
        "t", "s", Axis("x"), (ChartRow("r", tuple(NamedValue(f"v{n}", 1) for n in range(8))),)
    )
    hatches = [element.find(f"{NS}path") for element in parse_chart(stack).iter(f"{NS}pattern")]
    assert len({None if element is None else element.get("d") for element in hatches}) == 8
    bar = render_text(stack, 80, unicode=False).split("\n")[1]
    assert len(set(bar) - set("r ")) == 8


def test_ids_are_unique_on_a_page(charts):
    ids = [
        element.get("id")
        for number, chart in enumerate(charts * 2)
        for element in ElementTree.fromstring(draw_chart(chart, WIDE_PIXELS, f"p{number}")).iter()
        if element.get("id")
    ]
    assert len(ids) == len(set(ids))


def test_values_that_cannot_be_drawn_raise_assertion_errors(plot):
    for value in (float("nan"), float("inf")):
        with pytest.raises(AssertionError):
            Plot("t", "s", Axis("x"), Axis("y"), (Series("", (Point(0, value),)),))
    with pytest.raises(AssertionError):
        Plot("t", "s", Axis("x", True), Axis("y"), (Series("", (Point(0, 1),)),))
    with pytest.raises(AssertionError):
        RowChart("t", "s", Axis("x"), ())


def test_the_hostile_name_needs_escaping():
    assert escape(HOSTILE) != HOSTILE
