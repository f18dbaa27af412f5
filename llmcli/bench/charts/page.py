"""One self-contained page: pictures with their numbers below them, tables, facts. It loads and runs
nothing.

A strict Content-Security-Policy says so to the browser as well: only the one style whose hash it
names is obeyed. The page is well-formed XML. Every text in it may be somebody else's (a model's
name, a path) and is escaped by markup.py.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.bench.charts.chart import Chart, Table
from llmcli.bench.charts.markup import Markup, element
from llmcli.bench.charts.style import STYLE
from llmcli.bench.charts.svg import SLIM, WIDE, svg
from llmcli.bench.charts.table import table

OPEN = 12  # rows of numbers that are shown unasked below a picture


@dataclass(frozen=True, slots=True)
class Page:
    """A report. `lead`: what to remember, in sentences; `tables` and `facts` by their headings."""

    title: str
    about: str
    lead: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[tuple[str, Table], ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def html(page: Page) -> str:
    """The page as text of a file in UTF-8."""
    body = element(
        "main",
        element("h1", page.title),
        element("p", page.about, class_="soft"),
        element("ul", *(element("li", one) for one in page.lead)) if page.lead else None,
        *(_section(chart, number) for number, chart in enumerate(page.charts)),
        *(element("section", element("h2", name), _table(one)) for name, one in page.tables),
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
        element("style", Markup(STYLE)),  # not text: it has neither < nor &
    )


def _section(chart: Chart, number: int) -> Markup:
    """A picture for wide screens and one for narrow ones, and its numbers."""
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


def _table(one: Table) -> Markup:
    """A table that scrolls by itself where it is wider than the page."""

    def cell(name: str, number: int, words: str, scope: str | None = None) -> Markup:
        return element(name, words, class_="n" if number in one.right else None, scope=scope)

    def row(first: str, *rest: str) -> Markup:
        return element(
            "tr",
            cell("th", 0, first, "row"),
            *(cell("td", at, words) for at, words in enumerate(rest, 1)),
        )

    head = element("tr", *(cell("th", at, words, "col") for at, words in enumerate(one.columns)))
    whole = element(
        "table", element("thead", head), element("tbody", *(row(*cells) for cells in one.rows))
    )
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label="numbers")


def _facts(rows: Sequence[tuple[str, str]]) -> Markup:
    return element(
        "dl",
        *(piece for name, value in rows for piece in (element("dt", name), element("dd", value))),
    )
