"""--report and --chart of `bench`: a failed write leaves the old page intact, and the results are
printed in every case.
"""

import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from llmcli.hardware import host
from llmcli.ui import UI
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
FAST = ("-r", "1", "-t", "1")


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a memory bandwidth of 10 GB/s, and shorten the prompts."""
    monkeypatch.setattr(host, "last_cache_bytes", lambda: 16)
    monkeypatch.setattr(memory_bandwidth, "buffer_sizes", lambda cache, available: [64, 256])
    monkeypatch.setattr(
        memory_bandwidth,
        "measure_bandwidth",
        lambda size, threads, *more: BandwidthReading(size, threads, (8e9, 1e10)),
    )
    monkeypatch.setattr("llmcli.bench.roofline.PROMPT_TOKENS", 16)
    monkeypatch.setattr("llmcli.bench.roofline.GENERATED_TOKENS", 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose file name is HTML markup, to test that pages escape it."""
    return tiny_gguf.llama(
        tmp_path / "<img src=x onerror=alert(1)>.gguf", hidden=64, ff=128, layers=2
    )


def titles(page: Path) -> list[str | None]:
    return [heading.text for heading in ElementTree.fromstring(page.read_text()).iter("h2")]


def test_bench_and_roofline_write_a_page(llmcli: Llmcli, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    done = llmcli(
        "bench", str(model), "-p", "8", "-n", "4", "-d", "0,8", *FAST, "--report", str(out)
    )
    assert (done.code, f"report: {out}" in done.err) == (0, True)
    assert "tg4 @ d8" in done.out
    assert {
        "Generation and reading speed",
        "Time of a token",
        "Memory",
        "All rows",
        "Machine",
        "Build",
    } <= set(titles(out))
    done = llmcli(
        "bench", "roofline", str(model), "-d", "0,8", *FAST, "--report", str(out), "--json"
    )
    assert json.loads(done.out)["decode"]
    assert {"Roofline", "Percentiles of a token's time", "Memory", "Reading memory"} <= set(
        titles(out)
    )
    text = out.read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert not re.search("<(img|script|link|a|iframe)", text)
    assert not list(tmp_path.glob(".out.html*"))


def test_roofline_without_a_model_writes_a_page(llmcli: Llmcli, tmp_path: Path) -> None:
    assert llmcli("bench", "roofline", "--report", str(tmp_path / "m.html")).code == 0
    assert titles(tmp_path / "m.html") == ["Reading memory", "Machine"]


@pytest.mark.parametrize("command", [("bench",), ("bench", "roofline")])
def test_an_unwritable_report_path_is_an_error_before_any_measurement(
    llmcli: Llmcli,
    model: Path,
    tmp_path: Path,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(memory_bandwidth, "measure_bandwidth", fail)
    monkeypatch.setattr("llmcli.bench.speed.measure.measure_test", fail)
    (tmp_path / "file").write_text("a file")
    for path, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "out.html", "File exists"),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("/dev/null"), "it is not a regular file"),
    ):
        done = llmcli(*command, str(model), *FAST, "--report", str(path))
        assert (done.code, done.out) == (1, "")
        first, second = done.err.splitlines()
        assert first.startswith("error: cannot write ") and reason in first
        assert second.startswith("hint: ")


def test_a_failed_write_leaves_the_printed_results_and_the_old_page(
    llmcli: Llmcli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.html"
    out.write_text("the old page")

    def fail_on_full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail_on_full_disk)
    done = llmcli(
        "bench", str(model), "-p", "0", "-n", "4", *FAST, "--report", str(out), "-o", "json"
    )
    assert done.code == 1
    assert json.loads(done.out)[0]["n_gen"] == 4
    assert f"error: cannot write {out}: No space left on device" in done.err
    assert out.read_text() == "the old page"
    assert not list(tmp_path.glob(".out.html*"))


def test_charts_are_printed_only_with_chart_when_stdout_is_a_pipe(
    llmcli: Llmcli, model: Path
) -> None:
    words = ("bench", str(model), "-p", "0", "-n", "4", *FAST)
    assert "Percentiles" not in llmcli(*words).out  # a pipe
    assert "Percentiles" in llmcli(*words, "--chart").out
    done = llmcli(*words, "--chart", "-o", "json")
    assert json.loads(done.out)
    assert "Percentiles" in done.err
    lines = llmcli("bench", "roofline", str(model), *FAST, "--chart").out.splitlines()
    roof = lines[next(n for n, line in enumerate(lines) if line.startswith("Roofline")) :]
    assert "operations" in roof[1]  # the title of the y axis
    assert len([line for line in roof[2:16] if line.lstrip()[:1].isdigit()]) > 1
    assert roof[17].split()
    assert "64 B, 1 thread" in llmcli("bench", "roofline", "--chart").out


@pytest.mark.parametrize(
    ("encoding", "unicode"), [("utf-8", True), ("iso8859-1", False), ("ascii", False)]
)
def test_charts_are_ascii_when_the_encoding_lacks_block_characters(
    monkeypatch: pytest.MonkeyPatch, encoding: str, unicode: bool
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "57")
    calls: list[tuple[int, bool]] = []
    UI().print_drawing(lambda *layout: str(calls.append(layout)))
    assert calls == [(57, unicode)]


def test_a_terminal_gets_the_charts_that_add_to_the_table(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: self is sys.stdout, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    words = ("bench", str(model), "-p", "0", "-n", "4", *FAST)
    out = llmcli(*words).out
    assert "Percentiles" in out and "Generation" not in out  # a chart of one bar adds nothing
    charts = out.partition("Percentiles")[2]
    assert max(map(len, charts.splitlines())) <= 60
    assert "\x1b" not in charts
    assert "Percentiles" not in llmcli(*words, "--no-chart").out
