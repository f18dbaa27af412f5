"""Charts of every kind, with names that would do harm if they were not escaped."""

import pytest

from llmcli.bench.charts.chart import Axis, Plot, Point, Row, Rows, Rule, Series, Value

HOSTILE = """<script>alert("1")</script>&'\x1b]0;x\x07\u202e\ud800 模型"""


# Every element that a picture, and a page, may have.
DRAWN = {"svg", "title", "desc", "g", "text", "line", "path", "circle", "rect", "defs", "pattern"}
WRITTEN = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "main",
    "h1",
    "h2",
    "p",
    "ul",
    "li",
    "section",
    "figure",
    "details",
    "summary",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "dl",
    "dt",
    "dd",
}


@pytest.fixture
def plot() -> Plot:
    """Log-log with a line, two kinds of marks close to one another, and a rule."""
    line = tuple(Point(x, min(10 * x, 200)) for x in (0.5, 20.0, 400.0))
    near = tuple(
        Point(2 + n / 50, 15 + n, f"depth {512 * n}", f"{200 - n} tok/s") for n in range(4)
    )
    return Plot(
        f"Roof of {HOSTILE}",
        "what it says",
        Axis("operations a byte", True),
        Axis("G operations/s", True),
        (
            Series("attainable", line, marks=False),
            Series(HOSTILE, near, line=False),
            Series("prompt", (Point(350, 180, "prompt"),), line=False),
        ),
        (Rule(20, "ridge: 20"),),
    )


@pytest.fixture
def bars() -> Rows:
    """Stacks of three parts, one of them without a value in between."""
    rows = tuple(
        Row(
            f"{name} tokens",
            (Value("weights", 93.8), Value(HOSTILE, kv), Value("free", 40.0)),
            f"{kv} more",
        )
        for name, kv in (("512", 10.25), ("4,096", 81.5), ("none", 0.0))
    )
    return Rows("Memory", "what it says", Axis("MiB"), rows)


@pytest.fixture
def dots() -> Rows:
    """Percentiles, and a row with a range."""
    names = ("p50", "p90", "p99", "max")
    rows = tuple(
        Row(
            f"tg{n}",
            tuple(
                Value(name, n * factor)
                for name, factor in zip(names, (1, 1.4, 2, 3.5), strict=True)
            ),
        )
        for n in (5, 7)
    )
    more = Row(HOSTILE, (Value("p50", 6.0),), span=(5.5, 6.5))
    return Rows(
        "Percentiles",
        "what it says",
        Axis("ms"),
        (*rows, more),
        dots=True,
        rules=(Rule(20, "too slow"),),
    )


@pytest.fixture
def charts(plot: Plot, bars: Rows, dots: Rows) -> list[Plot | Rows]:
    return [plot, bars, dots]
