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


class PageParser(HTMLParser):
    """Collects the elements, attributes and texts of a page, as a browser parses them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.open_tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open_tags.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


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


def test_hostile_names_do_not_add_elements_or_attributes(page):
    parser = PageParser()
    parser.feed(page)
    parser.close()
    assert parser.open_tags == []
    assert set(parser.tags) <= WRITTEN | DRAWN
    assert "".join(parser.texts).count('<script>alert("1")</script>') >= 10
    names = {name for name, _ in parser.attributes}
    assert not {name for name in names if name.startswith("on")} | (
        names & {"style", "href", "src", "srcset"}
    )


def test_the_page_is_well_formed_xml_without_control_characters(page):
    ElementTree.fromstring(page.encode())
    assert not set("\x1b\x07\u202e") & set(page)


def test_the_policy_allows_only_the_stylesheet_of_the_page(page):
    tree = ElementTree.fromstring(page)
    policy = next(
        element.get("content") for element in tree.iter("meta") if element.get("http-equiv")
    )
    style = tree.find("head/style").text
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert (
        policy
        == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in style and "@import" not in style and "<" not in style and "&" not in style


def test_the_tables_contain_every_value(page, plot, bars, dots):
    tree = ElementTree.fromstring(page)
    tables = [
        [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        for table in tree.iter("table")
    ]
    assert len(tables) == 4
    table_texts = [{text for row in table for text in row} for table in tables]
    for series in plot.series:
        for point in series.points:
            assert {
                format_number(point.x),
                format_number(point.y),
                *([point.full_label] if point.label else []),
            } <= table_texts[0]
    for chart, texts in ((bars, table_texts[1]), (dots, table_texts[2])):
        for row in chart.rows:
            assert {format_number(named.value) for named in row.values} | {
                format_number(end) for end in row.value_range or ()
            } <= texts
        assert {format_number(line.position) for line in chart.reference_lines} <= texts
    assert {len(row) for table in tables for row in table} == {2, 4, 5, 7}


def test_rows_of_a_data_table_have_as_many_cells_as_columns(charts):
    for chart in charts:
        table = build_data_table(chart)
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_every_chart_has_a_wide_and_a_narrow_picture(page):
    tree = ElementTree.fromstring(page)
    classes = [element.get("class") for element in tree.iter("{http://www.w3.org/2000/svg}svg")]
    assert classes == ["chart wide", "chart slim"] * 3
