"""A closed terminal or a signal ends the chat, in a real pseudo-terminal."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[3]
READY = r"\x1b\[\?2004h[^\n]*>>>"


def chat(model: Path, *flags: str) -> pexpect.spawn:
    words = ["-m", "llmcli.app", "chat", str(model), "-t", "1", "-c", "512", "--temp", "0", *flags]
    environment = os.environ | {
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "PYTHONPATH": str(ROOT),
    }
    return pexpect.spawn(
        sys.executable,
        words,
        env=environment,
        dimensions=(24, 80),
        timeout=240,
        encoding="utf-8",
        preexec_fn=as_usual,
    )


def as_usual() -> None:
    """A terminal's SIGHUP, whatever runs the tests: what nohup ignores a chat ignores."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def ended(child: pexpect.spawn) -> int:
    """The exit code of a process whose terminal is gone."""
    _, status = os.waitpid(child.pid, 0)
    child.closed = child.ptyproc.closed = child.ptyproc.terminated = (
        True  # nothing is left for pexpect to do
    )
    return os.waitstatus_to_exitcode(status)


def said(home: Path) -> list[str]:
    """The texts of the session log's answers."""
    (log,) = (home / "state" / "sessions").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [line["text"] for line in lines if "text" in line]


def test_a_terminal_closed_at_the_prompt_ends_the_chat_and_keeps_what_was_said(
    stories_gguf: Path, home: Path
) -> None:
    child = chat(stories_gguf, "-n", "4")
    child.expect(READY)
    child.send("Once upon a time\r")
    child.expect("tok/s")
    child.expect(READY)
    child.send("half a l")
    child.ptyproc.fileobj.close()
    assert ended(child) == 128 + signal.SIGHUP
    assert len(said(home)) == 1


@pytest.mark.model
def test_a_terminal_closed_in_an_answer_keeps_what_had_come_of_it(
    smollm2: Path, home: Path
) -> None:
    child = chat(smollm2, "--ignore-eos", "--endless", "-c", "8192")
    child.expect(READY)
    child.send("Count from one to a thousand, and on, and on.\r")
    child.expect(re.escape("\x1b[?2004l"))  # the prompt is over: what follows is the answer
    child.expect(r"(\S+\s+){12}")  # some words of it
    os.kill(child.pid, signal.SIGHUP)  # as the kernel does, but what is written can still be seen
    child.expect(pexpect.EOF)
    child.close()
    assert "Traceback" not in (child.before or "")
    assert child.exitstatus == 128 + signal.SIGHUP
    assert len(said(home)[0].split()) >= 3


def test_a_terminating_signal_at_the_prompt_leaves_the_terminal_as_it_was(
    stories_gguf: Path, home: Path
) -> None:
    child = chat(stories_gguf, "-n", "4")
    child.expect(READY)
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    assert "\x1b[?2004l" in (child.before or "")  # bracketed paste is off again
    assert "Traceback" not in (child.before or "")
    child.close()
    assert child.exitstatus == 128 + signal.SIGTERM


def test_a_resized_terminal_goes_on(stories_gguf: Path, home: Path) -> None:
    child = chat(stories_gguf, "-n", "4")
    child.expect(READY)
    child.send("a line that is longer than ten columns")
    for rows, columns in ((5, 10), (1, 1), (60, 200)):
        child.setwinsize(rows, columns)
    child.send("\r")
    child.expect("tok/s")
    child.setwinsize(10, 40)
    child.expect(READY)
    child.send("/exit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_paste_of_a_megabyte_is_one_clear_line_and_the_chat_goes_on(
    stories_gguf: Path, home: Path
) -> None:
    child = chat(stories_gguf, "-n", "4")
    child.expect(READY)
    child.delaybeforesend = None
    child.send("\x1b[200~" + "word and \n" * 110_000 + "\x1b[201~")
    child.send("\r")
    found = child.expect(
        [re.compile(r"the prompt has \d+ tokens; the context holds 512"), pexpect.EOF]
    )
    assert found == 0, child.before
    child.expect(READY)
    child.send("Once upon a time\r")
    child.expect("tok/s")
    child.expect(READY)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
