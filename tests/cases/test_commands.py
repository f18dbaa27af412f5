"""Command lines with odd names of files and models: each does what it says, or gets one clear line.

A line of commands.jsonl is a command, the files of its folder, its exit code, and words of the error
and of the hint. A file is a small model ("model"), a file that macOS writes ("mac"), a link
("-> TARGET"), or has the given text.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cli import Done

CASES = [
    json.loads(line) for line in (Path(__file__).parent / "commands.jsonl").read_text().splitlines()
]


def write_file(path: Path, content: str, model: Path) -> None:
    """Write a file of a case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == "model":
        shutil.copyfile(model, path)
    elif content.startswith("-> "):
        path.symlink_to(content.removeprefix("-> "))
    else:
        path.write_bytes(b"\0\5\26\7\0\2\0\0" if content == "mac" else content.encode())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_command_does_what_it_says_or_gets_one_clear_line(
    case: dict[str, Any],
    stories_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    llmcli: Callable[..., Done],
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, content in case["files"].items():
        write_file(folder / name, content, stories_gguf)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    limits = ("-n", "1", "-t", "1", "-c", "64") if case["words"][0] == "run" else ()
    done = llmcli(*case["words"], *limits)
    lines = [line for line in done.err.splitlines() if line.startswith(("error: ", "hint: "))]
    assert done.code == case["code"], done.err
    assert len(lines) == (2 if case["code"] else 0)
    if case["code"]:
        error, hint = lines
        assert case["error"] in error
        assert case["hint"] in hint
        assert {path for path in folder.rglob("*") if path.is_file()} == set(before)
    assert all(path.read_bytes() == content for path, content in before.items())
