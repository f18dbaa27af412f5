"""Pages of the commands that measure something else than tests: plan, phases, compare, tune."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import Done
from tests.quant import tiny

Llmcli = Callable[..., Done]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.html"


def titles(page: Path) -> list[str | None]:
    return [one.text for one in ElementTree.fromstring(page.read_text()).iter("h2")]


def cells(page: Path) -> list[list[str]]:
    tree = ElementTree.fromstring(page.read_text())
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


def test_plan_writes_its_receipt_to_the_byte(llmcli: Llmcli, tmp_path: Path, out: Path) -> None:
    model = tiny.llama(tmp_path / "<b>.gguf", layers=2)
    done = llmcli("plan", str(model), "-c", "512", "--measure", "--report", str(out), "--chart")
    assert done.code == 0
    assert titles(out) == ["Memory", "In other types", "Bytes", "Machine", "Build"]
    rows = {row[0]: row[1:] for row in cells(out)}
    assert rows["CPU: KV cache"] == ["524,288", "524,288"]  # 512 cells, 2 layers, K and V of 2 heads of 64 f16
    assert rows["the whole process"][0] in done.out
    assert "&lt;b&gt;" in out.read_text()
    drawn = done.out.partition("\nMemory\n")[2]
    assert drawn.startswith("predicted █")
    assert "loaded" in drawn


def test_plan_tries_the_path_first(llmcli: Llmcli, tmp_path: Path) -> None:
    done = llmcli("plan", "no-such-model", "--report", str(tmp_path))
    assert (done.code, "it is a folder" in done.err) == (1, True)


def test_phases_draw_an_answer_and_a_token(llmcli: Llmcli, stories_gguf: Path, out: Path) -> None:
    words = ("bench", "phases", str(stories_gguf), "-p", "16", "-n", "4", "-r", "1", "-t", "1")
    done = llmcli(*words, "--report", str(out), "--chart")
    assert titles(out)[:2] == ["An answer", "A token"]
    assert "decode (llama.cpp)" in done.out.partition("An answer")[2]
