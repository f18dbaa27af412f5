"""Answers in a pseudo-terminal of several widths: no word is broken, neither in the answer nor in
the timing line below it.
"""

import json
import os
import re
import sys
from pathlib import Path

import pexpect
import pytest

from scripts.transcript.terminal import TerminalScreen
from tests.test_word_wrap import CHINESE, EMOJI, ENGLISH, WIDTHS, broken_words

ROOT = Path(__file__).parents[3]
ANSWER = f"{ENGLISH}{CHINESE}{EMOJI}\n\n{CHINESE}{ENGLISH}".strip()
TIMING_WORDS = {"ttft", "ms", "prefill", "tok", "s", "reused", "p", "forced", "grammar", "KV"}
TIMING_WORDS |= {"cells", "KiB", "MiB", "of", "loaded", "in"}
READY = r"\x1b\[\?2004h[^\n]*>>>"


def open_terminal(
    width: int, *words: str, term: str = "xterm"
) -> tuple[pexpect.spawn, TerminalScreen]:
    """Start llmcli in a pseudo-terminal of `width` columns. The screen gets its output."""
    # these variables would replace the size of the terminal
    environment = {name: os.environ[name] for name in os.environ.keys() - {"COLUMNS", "LINES"}}
    child = pexpect.spawn(
        sys.executable,
        ["-m", "llmcli.app", *words],
        env=environment | {"TERM": term, "PYTHONPATH": str(ROOT)},
        dimensions=(60, width),
        timeout=120,
        encoding="utf-8",
    )
    screen = child.logfile_read = TerminalScreen(width, 60, child.send)
    return child, screen


def split_screen(screen: TerminalScreen) -> tuple[list[str], str]:
    """Return the lines of the answer on the screen, and the timing line below it, joined again."""
    text = screen.text()
    start, end = text.index(ANSWER[:20]), text.index("[ttft")
    lines = text[start:end].rstrip("\n").split("\n")
    timing = re.match(r"\[[^\]]*\]", text[end:])
    assert timing
    return lines, timing[0]


def check_screen(screen: TerminalScreen, width: int) -> None:
    lines, timing = split_screen(screen)
    assert broken_words(ANSWER, lines) == []
    assert all(len(line) < width for line in timing.split("\n"))
    assert set(re.findall("[A-Za-z]+", timing)) <= TIMING_WORDS, timing


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_no_word_of_an_answer_is_broken(stories_gguf: Path, width: int, term: str) -> None:
    grammar = f"root ::= {json.dumps(ANSWER, ensure_ascii=False)}"
    words = ["run", str(stories_gguf), "Once", "--grammar", grammar, "--jump", "off", "-t", "1"]
    child, screen = open_terminal(width, *words, "-c", "2048", "-n", "1200", term=term)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, screen.text()
    check_screen(screen, width)


def test_no_word_of_a_chat_is_broken(stories_gguf: Path) -> None:
    grammar = f"root ::= {json.dumps(ANSWER, ensure_ascii=False)}"
    words = ["chat", str(stories_gguf), "--grammar", grammar, "-t", "1", "-c", "2048"]
    child, screen = open_terminal(60, *words)
    child.expect(READY)
    child.send("Once\r")
    child.expect(r"\[ttft")
    child.expect(READY)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, screen.text()
    check_screen(screen, 60)
