"""A self-contained HTML report: charts with their data below them, tables and facts. It loads and
runs nothing.

A strict Content-Security-Policy enforces this in the browser: only the stylesheet with the stated
hash applies. The page is well-formed XML. Its texts, such as model names and paths, are untrusted
and always escaped.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.charts.chart import Chart, Table
from llmcli.charts.data_table import table
from llmcli.charts.markup import Markup, element
from llmcli.charts.stylesheet import STYLE
from llmcli.charts.svg import SLIM, WIDE, svg

OPEN = 12  # data tables up to this many rows are expanded


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a report. `lead`: the main results as sentences. `tables` and `facts` come
    with their headings.
    """

    title: str
    about: str
    lead: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[tuple[str, Table], ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def html(page: Page) -> str:
    """Return the page as HTML text, to be stored as UTF-8."""
    body = element(
        "main",
        element("h1", page.title),
        element("p", page.about, class_="soft"),
        element("ul", *(element("li", item) for item in page.lead)) if page.lead else None,
        *(_section(chart, number) for number, chart in enumerate(page.charts)),
        *(element("section", element("h2", name), _table(item)) for name, item in page.tables),
        *(element("section", element("h2", name), _facts(rows)) for name, rows in page.facts),
    )
    return (
        "<!DOCTYPE html>\n"
        + element("html", _head(page.title), element("body", body), lang="en")
        + "\n"
    )


def _head(title: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(STYLE)),  # the stylesheet contains neither < nor &
    )


def _section(chart: Chart, number: int) -> Markup:
    """Return one chart for wide screens, one for narrow screens, and the data table."""
    numbers = table(chart)
    shown = {"open": "open"} if len(numbers.rows) <= OPEN else {}
    return element(
        "section",
        element("h2", chart.title),
        element("p", chart.says, class_="soft"),
        element(
            "figure",
            svg(chart, WIDE, f"w{number}", "wide"),
            svg(chart, SLIM, f"s{number}", "slim"),
        ),
        element("details", element("summary", "The numbers"), _table(numbers), **shown),
    )


def _table(data: Table) -> Markup:
    """Return a table that scrolls horizontally when it is wider than the page."""

    def cell(name: str, number: int, words: str, scope: str | None = None) -> Markup:
        return element(name, words, class_="n" if number in data.right else None, scope=scope)

    def row(first: str, *rest: str) -> Markup:
        return element(
            "tr",
            cell("th", 0, first, "row"),
            *(cell("td", at, words) for at, words in enumerate(rest, 1)),
        )

    head = element("tr", *(cell("th", at, words, "col") for at, words in enumerate(data.columns)))
    table_element = element(
        "table", element("thead", head), element("tbody", *(row(*cells) for cells in data.rows))
    )
    return element(
        "div", table_element, class_="scroll", tabindex="0", role="region", aria_label="numbers"
    )


def _facts(rows: Sequence[tuple[str, str]]) -> Markup:
    return element(
        "dl",
        *(piece for name, value in rows for piece in (element("dt", name), element("dd", value))),
    )
