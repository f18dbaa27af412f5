"""What is read for a command is never written over by what it makes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import Done
from tests.quant import tiny

WORDS = "Once there was a bird that sang of rain, and the rain came down on the roofs of the town. " * 4


@pytest.mark.parametrize(
    "words",
    [
        "calibrate m.gguf --text t.txt -o m.gguf",
        "calibrate m.gguf --text t.txt -o t.txt",
        "calibrate m.gguf --text t.txt -o s.gguf --moments link.gguf",
        "calibrate m.gguf --text t.txt -o s.gguf --moments ./s.gguf",
        "eval m.gguf --text t.txt --save-base m.gguf",
        "eval m.gguf --text t.txt --save-base t.txt",
        "quantize m.gguf --q4_0 --imatrix t.txt -o t.txt",
        "quantize m.gguf --q4_0 -o o.gguf --plan-out link.gguf",
        "quantize m.gguf --q4_0 -o o.gguf --plan-out o.gguf",
        "quantize m.gguf --target-bpw 5 --text t.txt --plan-out t.txt",
        "pareto m.gguf --types q4_0 --text t.txt --report m.gguf",
    ],
)
def test_a_file_that_is_read_stays(
    words: str, llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny.llama(Path("m.gguf"), hidden=64, ff=64, layers=1)
    Path("link.gguf").symlink_to(model)
    (text := Path("t.txt")).write_text(WORDS, encoding="utf-8")
    before = model.read_bytes()
    done = llmcli(*words.split())
    assert (done.code, done.out) == (1, ""), done.err
    assert "a name of its own" in done.err
    assert (model.read_bytes(), text.read_text(encoding="utf-8")) == (before, WORDS)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["link.gguf", "m.gguf", "t.txt"]


@pytest.mark.parametrize(
    "words",
    [
        "calibrate m.gguf --text t.txt --ctx 32 -o pipe",
        "eval m.gguf --text t.txt --ctx 32 --save-base pipe",
        "quantize m.gguf --q4_0 -o pipe",
        "quantize m.gguf --q4_0 -o o.gguf --plan-out pipe",
        "pareto m.gguf --types q4_0 --text t.txt --report pipe",
    ],
)
def test_no_file_takes_the_place_of_what_is_none(
    words: str, llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.llama(Path("m.gguf"), hidden=64, ff=64, layers=1)
    Path("t.txt").write_text(WORDS, encoding="utf-8")
    os.mkfifo("pipe")
    done = llmcli(*words.split())
    assert (done.code, done.out) == (1, ""), done.err
    assert "file" in done.err.splitlines()[-2]
    assert Path("pipe").is_fifo()
