"""The recorded talk: every command of the registry, used in a real pseudo-terminal."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from llmcli.chat.commands import commands

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_talk_that_uses_every_command_ends_well(
    stories_gguf: Path, home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "talk.txt"
    command = [
        sys.executable,
        ROOT / "scripts" / "record_repl.py",
        stories_gguf,
        "-o",
        out,
        "--predict",
        "4",
    ]
    done = subprocess.run(
        [*command, "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    complete(out.read_text(encoding="utf-8"))
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


def complete(shown: str) -> None:
    """Every command is used, and no path tells of the machine."""
    typed = [line for line in shown.splitlines() if line.startswith(">>> ")]
    for command in commands().values():
        assert any(line.split()[1:2] == [f"/{word}"] for line in typed for word in command.words), (
            command.name
        )
    assert "tokens · KV" in shown.splitlines()[-1]
    assert "\x1b" not in shown
    assert not re.search(r"(?<![\w.])/(tmp|root|home|work|usr/(?!bin is)|var|Users)\b", shown)


def test_the_talk_that_is_kept_uses_every_command() -> None:
    """One that was added or taken away since: scripts/transcript/record.py smollm2.gguf -o
    docs/transcript.txt.
    """
    complete((ROOT / "docs" / "transcript.txt").read_text(encoding="utf-8"))


def test_paper_shows_what_a_terminal_would() -> None:
    asked: list[str] = []
    paper = script("paper").Paper(10, 3, asked.append)
    for piece in (
        "one\r\ntwo\x1b",
        "[A\r\x1b[Kuno",
        "\r\n\x1b[2Ce!\x1b[6n",
        "\r\nabcdefghijklm\r\n\x1b]52;c;eA==\x07",
        "日本\r\nend",
    ):
        paper.write(piece)
    assert paper.text() == "uno\ntwe!\nabcdefghij\nklm\n日本\nend\n"
    assert asked == ["\x1b[2;5R"]
    assert paper.asides == ["52;c;eA=="]
