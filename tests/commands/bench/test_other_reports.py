"""The report pages of `plan`, `bench phases`, `bench compare`, `bench tune` and sweeps."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.bench.statistics.paired_test import Comparison
from llmcli.bench.tune import tune
from llmcli.bench.tune.tune import RunSetting, TriedSetting, TuningResult, TuningWorkload
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The path of the report page, which is not yet written."""
    return tmp_path / "out.html"


def titles(page: Path) -> list[str | None]:
    return [heading.text for heading in ElementTree.fromstring(page.read_text()).iter("h2")]


def cells(page: Path) -> list[list[str]]:
    tree = ElementTree.fromstring(page.read_text())
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


def test_plan_reports_exact_byte_counts(llmcli: Llmcli, tmp_path: Path, out: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "<b>.gguf", layers=2)
    done = llmcli("plan", str(model), "-c", "512", "--measure", "--report", str(out), "--chart")
    assert done.code == 0
    assert titles(out) == ["Memory", "In other types", "Bytes", "Machine", "Build"]
    rows = {row[0]: row[1:] for row in cells(out)}
    assert rows["CPU: KV cache"] == [
        "524,288",
        "524,288",
    ]  # 512 cells, 2 layers, K and V of 2 heads of 64 f16
    assert rows["whole process"][0] in done.out
    assert "&lt;b&gt;" in out.read_text()
    drawn = done.out.partition("\nMemory\n")[2]
    bars = [line.split()[0] for line in drawn.splitlines()[:2]]
    assert bars == ["predicted", "loaded"]


def test_plan_checks_the_report_path_before_the_model(llmcli: Llmcli, tmp_path: Path) -> None:
    done = llmcli("plan", "no-such-model", "--report", str(tmp_path))
    assert (done.code, "it is a folder" in done.err) == (1, True)


def test_phases_charts_the_time_of_an_answer_and_of_a_token(
    llmcli: Llmcli, stories_gguf: Path, out: Path
) -> None:
    words = ("bench", "phases", str(stories_gguf), "-p", "16", "-n", "4", "-r", "1", "-t", "1")
    done = llmcli(*words, "--report", str(out), "--chart")
    assert titles(out)[:2] == ["An answer", "A token"]
    assert "decode (llama.cpp)" in done.out.partition("An answer")[2]


def test_compare_charts_the_ratio_and_both_speeds(
    llmcli: Llmcli, tmp_path: Path, out: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=128, layers=1)
    words = ("bench", "compare", str(model), "-p", "0", "-n", "4", "--seconds", "0.1", "-t", "1")
    done = llmcli(*words, "--report", str(out), "--chart")
    assert done.code == 0
    assert titles(out)[:2] == ["B relative to A", "Speed"]
    rows = [row for row in cells(out) if row[0] in ("tg4", "as fast", "tg4, A", "tg4, B")]
    assert [row[0] for row in rows] == ["tg4", "as fast", "tg4, A", "tg4, B"]
    assert rows[1][1] == "1"
    assert "as fast: 1" in done.out


FASTER_THAN_DEFAULTS, TOO_FEW_PAIRS = (
    Comparison(1.2, 1.1, 1.3, 0.99, (1.0,), (1.2,)),
    Comparison(1, 0, float("inf"), 0.9, (1.0,), (1.0,)),
)


@pytest.mark.parametrize("comparison", [None, FASTER_THAN_DEFAULTS, TOO_FEW_PAIRS])
def test_tune_charts_the_tried_values(
    llmcli: Llmcli,
    stories_gguf: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    comparison: Comparison | None,
) -> None:
    default, best = RunSetting(1, 1), RunSetting(2, 2)
    tried = (
        TriedSetting("threads", best, 1.2, 6, True),
        TriedSetting("mode", RunSetting(1, 1, flash="off"), 0.9, 3, False),
    )
    result = TuningResult(
        default,
        best if comparison else default,
        tried,
        TuningWorkload((512, 32), (512, 128), (0.001, 0.01)),
        9.0,
        comparison,
    )
    monkeypatch.setattr(tune, "tune_settings", lambda *args, **options: result)
    done = llmcli("bench", "tune", str(stories_gguf), "--report", str(out))
    assert done.code == 0
    assert titles(out) == [
        *(["Best settings relative to the defaults"] if comparison else []),
        "Tried values",
        "Machine",
        "Build",
    ]
    rows = [row for row in cells(out) if row[0].startswith(("threads", "flash"))]
    assert [(row[0], row[1]) for row in rows] == [
        ("threads 2", "1.2"),
        ("flash attention off, KV f16", "0.9"),
    ]


def test_a_sweep_charts_each_value_relative_to_the_fastest(
    llmcli: Llmcli, tmp_path: Path, out: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=128, layers=1)
    words = ("bench", str(model), "--fa-sweep", "-p", "0", "-n", "4", "-r", "2", "-t", "1")
    assert llmcli(*words, "--report", str(out)).code == 0
    assert "tg4: each value relative to the fastest" in titles(out)
    assert {"fastest", "level"} & {cell for row in cells(out) for cell in row}
