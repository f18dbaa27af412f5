"""Commands refuse output paths that would overwrite their inputs, and unusable paths."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

TEXT = (
    "Once there was a bird that sang of rain, and the rain came down on the roofs of the town. " * 4
)


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
def test_an_output_path_that_is_also_an_input_is_refused(
    words: str, llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_gguf.llama(Path("m.gguf"), hidden=64, ff=64, layers=1)
    Path("link.gguf").symlink_to(model)
    (text := Path("t.txt")).write_text(TEXT, encoding="utf-8")
    before = model.read_bytes()
    done = llmcli(*words.split())
    assert (done.code, done.out) == (1, ""), done.err
    assert "another name for the output" in done.err
    assert (model.read_bytes(), text.read_text(encoding="utf-8")) == (before, TEXT)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "link.gguf",
        "m.gguf",
        "t.txt",
    ]


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
def test_an_output_path_that_is_a_pipe_is_refused(
    words: str, llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_gguf.llama(Path("m.gguf"), hidden=64, ff=64, layers=1)
    Path("t.txt").write_text(TEXT, encoding="utf-8")
    os.mkfifo("pipe")
    done = llmcli(*words.split())
    assert (done.code, done.out) == (1, ""), done.err
    assert "file" in done.err.splitlines()[-2]
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    "words",
    [
        "run m.gguf -f ~nobody-9/x",
        "eval m.gguf --text ~nobody-9/x",
        "serve m.gguf --api-key-file ~nobody-9/x",
    ],
)
def test_a_path_with_an_unknown_home_directory_is_an_error(
    words: str, llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_gguf.llama(Path("m.gguf"), hidden=64, ff=64, layers=1)
    done = llmcli(*words.split())
    assert (done.code, done.out) == (1, "")
    assert "cannot expand ~: no such home directory" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quantize m.gguf --q4_0 -o file/o.gguf", "file is a file, not a folder"),
        ("batch m.gguf m.gguf -o file/o.jsonl", "file is a file, not a folder"),
        ("export vllm m.gguf --original a/b -o file", "a file has the name of the needed folder"),
    ],
)
def test_a_file_with_the_name_of_a_needed_folder_is_an_error(
    words: str,
    message: str,
    llmcli: Callable[..., Done],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_gguf.llama(Path("m.gguf"), hidden=64, ff=64, layers=1)
    Path("file").write_bytes(b"")
    done = llmcli(*words.split())
    assert (done.code, done.out) == (1, "")
    assert message in done.err


def test_an_unusable_temporary_folder_is_an_error(
    llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "file")])
    model = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, ff=64, layers=1)
    done = llmcli("plan", str(model))
    assert (done.code, done.out) == (1, "")
    assert "TMPDIR" in done.err
