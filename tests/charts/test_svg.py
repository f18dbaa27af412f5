"""The charts as XML: their content, and that nothing leaves the picture or overlaps a label."""

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


def parsed(chart, wide=WIDE_PIXELS):
    return ElementTree.fromstring(draw_chart(chart, wide, "a"))


def words(tree) -> list[str]:
    return [one.text or "" for one in tree.iter(f"{NS}text")]


def boxes(tree) -> list[Box]:
    """Where the labels of a plot's points lie."""
    found = []
    for one in tree.iter(f"{NS}text"):
        if one.get("class") == "label":
            x, y, wide = float(one.get("x")), float(one.get("y")), text_width(one.text)
            found.append(Box(x, y - 12, x + wide, y + 4))
    return found


@pytest.mark.parametrize("wide", [NARROW_PIXELS, WIDE_PIXELS])
def test_it_is_xml_with_words_for_those_who_do_not_see_it(charts, wide):
    for chart in charts:
        tree = parsed(chart, wide)
        title, desc = tree.find(f"{NS}title"), tree.find(f"{NS}desc")
        assert tree.get("role") == "img"
        assert tree.get("aria-labelledby").split() == [title.get("id"), desc.get("id")]
        assert (escape(title.text), desc.text) == (escape(chart.title), "what it says")
        assert {one.tag for one in tree.iter()} <= {NS + name for name in DRAWN}
        names = {key for one in tree.iter() for key in one.attrib}
        assert not {name for name in names if name.startswith("on") or name in ("style", "href")}


def test_hostile_names_are_text(charts):
    for chart in charts:
        drawn = draw_chart(chart)
        assert "<script" not in drawn
        assert not set("\x1b\x07\u202e\ud800") & set(drawn)
        drawn.encode()
        shown = "".join(words(ElementTree.fromstring(drawn)))
        assert '<script>alert("1")</script>' in shown


@pytest.mark.parametrize("wide", [NARROW_PIXELS, WIDE_PIXELS])
def test_nothing_leaves_the_picture(charts, wide):
    for chart in charts:
        tree = parsed(chart, wide)
        high = float(tree.get("height"))
        for one in tree.iter(f"{NS}text"):
            x, y, half = one.get("x"), float(one.get("y")), text_width(one.text or "")
            left = float(x) - {"end": half, "middle": half / 2}.get(one.get("text-anchor"), 0)
            assert left >= -0.5, one.text
            assert left + half <= wide + 0.5, one.text
            assert -6 <= y <= high
        for one in tree.iter(f"{NS}rect"):
            if one.get("class") == "part":
                assert float(one.get("x")) + float(one.get("width")) <= wide


@pytest.mark.parametrize("wide", [NARROW_PIXELS, WIDE_PIXELS])
def test_labels_keep_off_one_another(wide):
    points = tuple(
        Point(2 + n / 50, 15 + n / 3, f"depth {512 * n}", f"{200 - n} tok/s") for n in range(6)
    )
    tree = parsed(
        Plot("t", "s", Axis("x", True), Axis("y", True), (Series("", points, line=False),)), wide
    )
    found = boxes(tree)
    assert len(found) >= 4
    assert not any(one.overlap_area(other) for one, other in combinations(found, 2))


def test_a_label_stands_at_its_own_mark_or_is_led_to_it():
    points = tuple(Point(x, 10.0, f"test {x}", "123.4 tok/s") for x in (1.0, 1.2, 1.5, 2.0, 4.0))
    tree = parsed(
        Plot("t", "s", Axis("x", True), Axis("y"), (Series("", points, line=False),)), NARROW_PIXELS
    )
    marks = {
        point.label: float(one.get("cx"))
        for point, one in zip(points, tree.iter(f"{NS}circle"), strict=True)
    }
    leads = {float(one.get("x1")) for one in tree.iter(f"{NS}line") if one.get("class") == "lead"}
    shown = [one for one in tree.iter(f"{NS}text") if one.get("class") == "label"]
    assert len(shown) >= 3
    for one, box in zip(shown, boxes(tree), strict=True):
        own = marks[one.text.partition(":")[0]]
        gaps = {at: max(box.x_min - at, at - box.x_max, 0) for at in marks.values()}
        assert gaps[own] == min(gaps.values()) or any(abs(own - lead) < 0.1 for lead in leads)


def test_places_follow_the_values():
    points = tuple(Point(x, y) for x, y in ((1, 1), (10, 10), (100, 100)))
    tree = parsed(
        Plot("t", "s", Axis("x", True), Axis("y", True), (Series("", points, line=False),))
    )
    places = [(float(one.get("cx")), float(one.get("cy"))) for one in tree.iter(f"{NS}circle")]
    (x1, y1), (x2, y2), (x3, y3) = places
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.1) and x2 > x1
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.1) and y2 < y1


def test_bars_are_as_long_as_their_values(bars):
    parts = [
        one
        for one in parsed(bars).iter(f"{NS}rect")
        if one.get("class") == "part" and one.get("height") == "14"
    ]
    lengths = [float(one.get("width")) for one in parts]
    values = [value.value for row in bars.rows for value in row.values]
    scale = lengths[0] / values[0]
    assert lengths == pytest.approx([max(value * scale, 0.75) for value in values], abs=0.1)


def test_no_series_is_told_by_colour_alone():
    series = tuple(Series(f"s{n}", (Point(0, n), Point(1, n + 1))) for n in range(6))
    tree = parsed(Plot("t", "s", Axis("x"), Axis("y"), series))
    lines = [one for one in tree.iter(f"{NS}path") if (one.get("class") or "").startswith("line ")]
    assert len({one.get("stroke-dasharray") for one in lines}) == 6
    shapes = {
        (one.tag, re.sub(r"[\d. -]+", "", one.get("d", "")))
        for one in tree.iter()
        if (one.get("class") or "").startswith("mark ")
    }
    assert len(shapes) >= 4
    stack = RowChart(
        "t", "s", Axis("x"), (ChartRow("r", tuple(NamedValue(f"v{n}", 1) for n in range(8))),)
    )
    hatches = [one.find(f"{NS}path") for one in parsed(stack).iter(f"{NS}pattern")]
    assert len({None if one is None else one.get("d") for one in hatches}) == 8
    drawn = render_text(stack, 80, unicode=False).split("\n")[1]
    assert len(set(drawn) - set("r ")) == 8


def test_pictures_of_one_page_share_no_names(charts):
    names = [
        one.get("id")
        for number, chart in enumerate(charts * 2)
        for one in ElementTree.fromstring(draw_chart(chart, WIDE_PIXELS, f"p{number}")).iter()
        if one.get("id")
    ]
    assert len(names) == len(set(names))


def test_what_cannot_be_drawn_is_our_bug(plot):
    for value in (float("nan"), float("inf")):
        with pytest.raises(AssertionError):
            Plot("t", "s", Axis("x"), Axis("y"), (Series("", (Point(0, value),)),))
    with pytest.raises(AssertionError):
        Plot("t", "s", Axis("x", True), Axis("y"), (Series("", (Point(0, 1),)),))
    with pytest.raises(AssertionError):
        RowChart("t", "s", Axis("x"), ())


def test_the_hostile_name_is_hostile():
    assert escape(HOSTILE) != HOSTILE
