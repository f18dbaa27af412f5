"""Renders a report as one self-contained HTML page: charts with their data tables, further tables,
and lists of facts. The page loads no other file and runs no script.

A strict Content-Security-Policy makes the browser enforce this: it allows nothing but the page's
own stylesheet, which it identifies by its hash. The page is also well-formed XML. All texts in it
are escaped, because model names and paths are untrusted input.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.chart import Chart, Table
from llmcli.charts.data_table import build_data_table
from llmcli.charts.markup import Markup, build_element
from llmcli.charts.stylesheet import STYLESHEET
from llmcli.charts.svg import NARROW_PIXELS, WIDE_PIXELS, draw_chart

MAX_EXPANDED_ROWS = 12  # longer data tables are collapsed at first


@dataclass(frozen=True, slots=True)
class ReportPage:
    """The content of a report. `lead`: sentences with the main results, shown first. `tables`:
    pairs of heading and table. `facts`: pairs of heading and a list of (name, value) pairs.
    """

    title: str
    subtitle: str
    lead: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[tuple[str, Table], ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def render_html(page: ReportPage) -> str:
    """Return the report as the text of an HTML file, which must be stored as UTF-8."""
    body = build_element(
        "main",
        build_element("h1", page.title),
        build_element("p", page.subtitle, class_="soft"),
        build_element("ul", *(build_element("li", sentence) for sentence in page.lead))
        if page.lead
        else None,
        *(_section(chart, number) for number, chart in enumerate(page.charts)),
        *(
            build_element("section", build_element("h2", name), _table(table))
            for name, table in page.tables
        ),
        *(
            build_element("section", build_element("h2", name), _facts(rows))
            for name, rows in page.facts
        ),
    )
    return (
        "<!DOCTYPE html>\n"
        + build_element("html", _head(page.title), build_element("body", body), lang="en")
        + "\n"
    )


def _head(title: str) -> Markup:
    """Return the head element with the title, the stylesheet and the Content-Security-Policy."""
    digest = base64.b64encode(hashlib.sha256(STYLESHEET.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return build_element(
        "head",
        build_element("meta", charset="utf-8"),
        build_element("meta", http_equiv="Content-Security-Policy", content=policy),
        build_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build_element("meta", name="color-scheme", content="light dark"),
        build_element("meta", name="referrer", content="no-referrer"),
        build_element("title", title),
        # needs no escaping, because the stylesheet contains neither < nor &
        build_element("style", Markup(STYLESHEET)),
    )


def _section(chart: Chart, number: int) -> Markup:
    """Return the section of one chart: a wide and a narrow picture, of which the stylesheet shows
    the one that fits the screen, and a data table that can be collapsed. `number`: index of the
    chart on the page.
    """
    table = build_data_table(chart)
    is_open = "open" if len(table.rows) <= MAX_EXPANDED_ROWS else None
    return build_element(
        "section",
        build_element("h2", chart.title),
        build_element("p", chart.description, class_="soft"),
        build_element(
            "figure",
            draw_chart(chart, WIDE_PIXELS, f"w{number}", "wide"),
            draw_chart(chart, NARROW_PIXELS, f"s{number}", "slim"),
        ),
        build_element(
            "details", build_element("summary", "The numbers"), _table(table), open=is_open
        ),
    )


def _table(data: Table) -> Markup:
    """Return a table as markup. It scrolls horizontally if it is wider than the page."""

    def cell(tag: str, column: int, text: str, scope: str | None = None) -> Markup:
        return build_element(
            tag, text, class_="n" if column in data.right_aligned else None, scope=scope
        )

    def row(label: str, *texts: str) -> Markup:
        return build_element(
            "tr",
            cell("th", 0, label, "row"),
            *(cell("td", column, text) for column, text in enumerate(texts, 1)),
        )

    head = build_element(
        "tr", *(cell("th", column, text, "col") for column, text in enumerate(data.columns))
    )
    table_element = build_element(
        "table",
        build_element("thead", head),
        build_element("tbody", *(row(*cells) for cells in data.rows)),
    )
    return build_element(
        "div", table_element, class_="scroll", tabindex="0", role="region", aria_label="numbers"
    )


def _facts(rows: Sequence[tuple[str, str]]) -> Markup:
    """Return pairs of name and value as an HTML description list."""
    return build_element(
        "dl",
        *(
            element
            for name, value in rows
            for element in (build_element("dt", name), build_element("dd", value))
        ),
    )
