"""A self-contained HTML report: charts with their data tables, other tables, and facts. The page
loads nothing and runs no script.

The browser enforces this by a strict Content-Security-Policy, which allows only the stylesheet
whose hash it states. The page is well-formed XML. Its texts, such as model names and paths, are
untrusted input and are always escaped.
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
    """The content of a report. `lead`: sentences with the main results. `tables` and `facts`: each
    with its heading.
    """

    title: str
    subtitle: str
    lead: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[tuple[str, Table], ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def render_html(page: ReportPage) -> str:
    """Return the page as HTML text, to be stored as UTF-8."""
    body = build_element(
        "main",
        build_element("h1", page.title),
        build_element("p", page.subtitle, class_="soft"),
        build_element("ul", *(build_element("li", item) for item in page.lead))
        if page.lead
        else None,
        *(_section(chart, number) for number, chart in enumerate(page.charts)),
        *(
            build_element("section", build_element("h2", name), _table(item))
            for name, item in page.tables
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
    """Return one chart in two versions, for wide and narrow screens, with its data table."""
    numbers = build_data_table(chart)
    shown = {"open": "open"} if len(numbers.rows) <= MAX_EXPANDED_ROWS else {}
    return build_element(
        "section",
        build_element("h2", chart.title),
        build_element("p", chart.description, class_="soft"),
        build_element(
            "figure",
            draw_chart(chart, WIDE_PIXELS, f"w{number}", "wide"),
            draw_chart(chart, NARROW_PIXELS, f"s{number}", "slim"),
        ),
        build_element("details", build_element("summary", "The numbers"), _table(numbers), **shown),
    )


def _table(data: Table) -> Markup:
    """Return a table. It scrolls horizontally if it is wider than the page."""

    def cell(name: str, number: int, words: str, scope: str | None = None) -> Markup:
        return build_element(
            name, words, class_="n" if number in data.right_aligned else None, scope=scope
        )

    def row(first: str, *rest: str) -> Markup:
        return build_element(
            "tr",
            cell("th", 0, first, "row"),
            *(cell("td", at, words) for at, words in enumerate(rest, 1)),
        )

    head = build_element(
        "tr", *(cell("th", at, words, "col") for at, words in enumerate(data.columns))
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
    return build_element(
        "dl",
        *(
            piece
            for name, value in rows
            for piece in (build_element("dt", name), build_element("dd", value))
        ),
    )
