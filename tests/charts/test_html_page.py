import base64
import hashlib
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from llmcli.charts.chart import Table
from llmcli.charts.data_table import build_data_table
from llmcli.charts.html_page import ReportPage, render_html
from llmcli.charts.scale import format_number
from tests.fixtures.charts import DRAWN, HOSTILE, WRITTEN

VOID = ("meta", "br")


class Reader(HTMLParser):
    """A page as a browser takes it apart: its elements, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def page(charts) -> str:
    rows = (("tg128", "190.2"), (HOSTILE, "1"))
    return render_html(
        ReportPage(
            f"{HOSTILE} on this machine",
            "about",
            (f"lead {HOSTILE}",),
            tuple(charts),
            (("All rows", Table(("test", "tok/s"), rows, frozenset([1]))),),
            (("Machine", (("CPU", HOSTILE),)),),
        )
    )


def test_a_browser_finds_our_elements_and_no_others(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert set(reader.tags) <= WRITTEN | DRAWN
    assert "".join(reader.words).count('<script>alert("1")</script>') >= 10
    names = {name for name, _ in reader.attributes}
    assert not {name for name in names if name.startswith("on")} | (
        names & {"style", "href", "src", "srcset"}
    )


def test_it_is_well_formed_xml_of_text_that_utf_8_can_hold(page):
    ElementTree.fromstring(page.encode())
    assert not set("\x1b\x07\u202e") & set(page)


def test_nothing_but_its_own_style_may_be_obeyed(page):
    tree = ElementTree.fromstring(page)
    policy = next(one.get("content") for one in tree.iter("meta") if one.get("http-equiv"))
    style = tree.find("head/style").text
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert (
        policy
        == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in style and "@import" not in style and "<" not in style and "&" not in style


def test_every_value_stands_in_a_table(page, plot, bars, dots):
    tree = ElementTree.fromstring(page)
    tables = [
        [["".join(cell.itertext()) for cell in row] for row in one.iter("tr")]
        for one in tree.iter("table")
    ]
    assert len(tables) == 4
    flat = [{cell for row in one for cell in row} for one in tables]
    for series in plot.series:
        for point in series.points:
            assert {
                format_number(point.x),
                format_number(point.y),
                *([point.full_label] if point.label else []),
            } <= flat[0]
    for chart, cells in ((bars, flat[1]), (dots, flat[2])):
        for row in chart.rows:
            assert {format_number(one.value) for one in row.values} | {
                format_number(end) for end in row.value_range or ()
            } <= cells
        assert {format_number(line.position) for line in chart.reference_lines} <= cells
    assert {len(row) for one in tables for row in one} == {2, 4, 5, 7}


def test_numbers_are_right_of_their_columns_and_rows_are_whole(charts):
    for chart in charts:
        found = build_data_table(chart)
        assert {len(row) for row in found.rows} == {len(found.columns)}


def test_each_picture_is_drawn_for_screens_and_for_phones(page):
    tree = ElementTree.fromstring(page)
    kinds = [one.get("class") for one in tree.iter("{http://www.w3.org/2000/svg}svg")]
    assert kinds == ["chart wide", "chart slim"] * 3
