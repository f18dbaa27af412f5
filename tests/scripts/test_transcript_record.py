"""scripts/transcript: the recorded chat uses every REPL command, and the terminal emulator."""

import re
import subprocess
import sys
from pathlib import Path

from llmcli.chat.commands import commands
from scripts.transcript.terminal import TerminalScreen

ROOT = Path(__file__).parents[2]


def test_recorded_chat_uses_every_command(stories_gguf: Path, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "talk.txt"
    command = [
        sys.executable,
        ROOT / "scripts" / "transcript" / "record.py",
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
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert_complete(out.read_text(encoding="utf-8"))
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


def assert_complete(shown: str) -> None:
    """Assert that a transcript uses every command and shows no path of this machine."""
    typed = [line for line in shown.splitlines() if line.startswith(">>> ")]
    for command in commands().values():
        assert any(
            line.split()[1:2] == [f"/{word}"] for line in typed for word in command.spellings
        ), command.name
    assert "tokens · KV" in shown.splitlines()[-1]
    assert "\x1b" not in shown
    assert not re.search(r"(?<![\w.])/(tmp|root|home|work|usr/(?!bin is)|var|Users)\b", shown)


def test_stored_transcript_uses_every_command() -> None:
    """If it fails, run scripts/transcript/record.py smollm2.gguf -o docs/transcript.txt."""
    assert_complete((ROOT / "docs" / "transcript.txt").read_text(encoding="utf-8"))


def test_terminal_screen_shows_the_visible_text() -> None:
    replies: list[str] = []
    screen = TerminalScreen(10, 3, replies.append)
    for piece in (
        "one\r\ntwo\x1b",
        "[A\r\x1b[Kuno",
        "\r\n\x1b[2Ce!\x1b[6n",
        "\r\nabcdefghijklm\r\n\x1b]52;c;eA==\x07",
        "日本\r\nend",
    ):
        screen.write(piece)
    assert screen.text() == "uno\ntwe!\nabcdefghij\nklm\n日本\nend\n"
    assert replies == ["\x1b[2;5R"]
    assert screen.osc_sequences == ["52;c;eA=="]
