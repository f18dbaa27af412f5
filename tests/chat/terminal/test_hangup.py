"""A closed terminal, SIGTERM and other events of a chat in a pseudo-terminal."""

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


def start_chat(model: Path, *flags: str) -> pexpect.spawn:
    """Start `llmcli chat` in a pseudo-terminal."""
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
        preexec_fn=reset_hangup,
    )


def reset_hangup() -> None:
    """Reset SIGHUP, because the chat ignores it if the process that runs the tests does (nohup)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def exit_code(child: pexpect.spawn) -> int:
    """Return the exit code of a process whose terminal was closed."""
    _, status = os.waitpid(child.pid, 0)
    child.closed = child.ptyproc.closed = child.ptyproc.terminated = (
        True  # pexpect must not wait for the process
    )
    return os.waitstatus_to_exitcode(status)


def logged_answers(home: Path) -> list[str]:
    """Return the texts of all answers in the session log."""
    (log,) = (home / "state" / "sessions").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [line["text"] for line in lines if "text" in line]


def test_closing_the_terminal_at_the_prompt_ends_the_chat_and_keeps_its_log(
    stories_gguf: Path, home: Path
) -> None:
    child = start_chat(stories_gguf, "-n", "4")
    child.expect(READY)
    child.send("Once upon a time\r")
    child.expect("tok/s")
    child.expect(READY)
    child.send("half a l")
    child.ptyproc.fileobj.close()
    assert exit_code(child) == 128 + signal.SIGHUP
    assert len(logged_answers(home)) == 1


@pytest.mark.model
def test_closing_the_terminal_during_an_answer_keeps_the_incomplete_answer(
    smollm2: Path, home: Path
) -> None:
    child = start_chat(smollm2, "--ignore-eos", "--endless", "-c", "8192")
    child.expect(READY)
    child.send("Count from one to a thousand, and on, and on.\r")
    child.expect(re.escape("\x1b[?2004l"))  # the prompt has ended, and the answer follows
    child.expect(r"(\S+\s+){12}")  # the first words of the answer
    os.kill(child.pid, signal.SIGHUP)  # as the kernel does, but the output can still be read
    child.expect(pexpect.EOF)
    child.close()
    assert "Traceback" not in (child.before or "")
    assert child.exitstatus == 128 + signal.SIGHUP
    assert len(logged_answers(home)[0].split()) >= 3


def test_sigterm_at_the_prompt_restores_the_terminal(stories_gguf: Path, home: Path) -> None:
    child = start_chat(stories_gguf, "-n", "4")
    child.expect(READY)
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    assert "\x1b[?2004l" in (child.before or "")  # bracketed paste is off again
    assert "Traceback" not in (child.before or "")
    child.close()
    assert child.exitstatus == 128 + signal.SIGTERM


def test_the_chat_continues_after_the_terminal_is_resized(stories_gguf: Path, home: Path) -> None:
    child = start_chat(stories_gguf, "-n", "4")
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


def test_pasting_a_megabyte_prints_an_error_and_the_chat_continues(
    stories_gguf: Path, home: Path
) -> None:
    child = start_chat(stories_gguf, "-n", "4")
    child.expect(READY)
    child.delaybeforesend = None
    child.send("\x1b[200~" + "word and \n" * 110_000 + "\x1b[201~")
    child.send("\r")
    index = child.expect(
        [re.compile(r"the prompt has \d+ tokens; the context holds 512"), pexpect.EOF]
    )
    assert index == 0, child.before
    child.expect(READY)
    child.send("Once upon a time\r")
    child.expect("tok/s")
    child.expect(READY)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
