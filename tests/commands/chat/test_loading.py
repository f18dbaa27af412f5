"""What a terminal shows while a model loads."""

import os
import sys
from pathlib import Path

import pexpect
import pytest

from scripts.transcript.terminal import TerminalScreen

ROOT = Path(__file__).parents[3]
# Writes a mark when numpy, the first large library, is imported.
PROGRAM = """
import sys
class Watch:
    def find_spec(self, name, *more):
        if name == "numpy":
            sys.stderr.write("<numpy>")
sys.meta_path.insert(0, Watch())
from llmcli.app import main
main()
"""


def spawn(words: list[str], term: str = "xterm") -> tuple[pexpect.spawn, TerminalScreen]:
    child = pexpect.spawn(
        sys.executable,
        ["-c", PROGRAM, *words],
        env=os.environ | {"TERM": term, "PYTHONPATH": str(ROOT)},
        dimensions=(40, 120),
        timeout=120,
        encoding="utf-8",
    )
    screen = child.logfile_read = TerminalScreen(120, 40, child.send)
    return child, screen


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_the_terminal_says_at_once_that_a_model_is_loaded(stories_gguf: Path, term: str) -> None:
    child, screen = spawn(["run", str(stories_gguf), "Once", "-n", "4", "-t", "1"], term)
    child.expect_exact("starting …")
    child.expect_exact("<numpy>")
    child.expect_exact(f"loading {stories_gguf}"[:40])  # a long path is shortened
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    text = screen.text()
    assert "loaded in " in text
    if term == "xterm":  # what was being done has disappeared
        assert "starting" not in text.replace("<numpy>", "")
        assert "loading" not in text


def test_an_error_stands_alone_on_its_line(tmp_path: Path) -> None:
    for words in (["chat", str(tmp_path / "no.gguf")], ["run", "x", "--temp", "hot", "y"]):
        child, screen = spawn(words)
        child.expect_exact("starting …")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 1
        lines = screen.text().replace("<numpy>", "").strip().split("\n")
        assert lines[0].startswith("error: ")
        assert "starting" not in screen.text()


def test_a_chat_begins_with_its_model_and_the_load_time(stories_gguf: Path) -> None:
    child, screen = spawn(["chat", str(stories_gguf), "-t", "1", "-c", "256"])
    # a long path of the model moves the line's end to any of these words
    words = [
        r"256",
        r"of",
        r"512",
        r"tokens",
        r"of",
        r"context",
        r"·",
        r"loaded",
        r"in",
        r"\d+\.\d",
        r"s",
    ]
    child.expect(r"\s+".join(words))
    child.expect(">>>")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "loading" not in screen.text()


def test_a_pipe_gets_no_status(stories_gguf: Path) -> None:
    import subprocess

    command = [sys.executable, "-m", "llmcli.app", "run", str(stories_gguf), "Once", "-n", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "starting" not in done.stderr
    assert "loading" not in done.stderr
