"""The REPL in a pseudo-terminal, with a real model."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[3]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
READY = r"\x1b\[\?2004h[^\n]*>>>"  # a new prompt switches bracketed paste on
TIMING = r"\[ttft [^\]]*\]"


class Terminal:
    """Runs llmcli in a pseudo-terminal, types lines and waits for output."""

    def __init__(self, model: Path, command: str = "chat", *flags: str, **environ: str) -> None:
        words = [
            "-m",
            "llmcli.app",
            command,
            str(model),
            "-t",
            "1",
            "-n",
            "16",
            "-c",
            "2048",
            "--temp",
            "0",
            *flags,
        ]
        environment = (
            os.environ
            | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": str(ROOT)}
            | environ
        )
        self.child = pexpect.spawn(
            sys.executable,
            words,
            env=environment,
            dimensions=(40, 120),
            timeout=120,
            encoding="utf-8",
        )

    def type(self, text: str, key: str = "\r") -> None:
        """Wait for the prompt and type a line."""
        self.child.expect(READY)
        self.child.send(text + key)

    def answer(self) -> str:
        """Return the output up to and including the next timing line, without escape sequences,
        with a space for each line break: the line may be wrapped at any word.
        """
        self.child.expect(TIMING + r"( \([^)]*\))?")
        text = ESCAPE.sub("", (self.child.before or "") + str(self.child.after))
        return " ".join(text.split())

    def leave(self) -> int:
        """Leave the chat with Ctrl-D and return the exit code."""
        self.child.expect(READY)
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)


@pytest.fixture
def terminal(smollm2: Path) -> Iterator[Terminal]:
    repl = Terminal(smollm2)
    yield repl
    repl.child.close(force=True)


@pytest.mark.model
def test_a_conversation_from_the_first_question_to_ctrl_d(terminal: Terminal, home: Path) -> None:
    terminal.type("Hello, who are you?")
    assert "+0 reused" in terminal.answer()
    terminal.type("/kv")
    terminal.child.expect(r"difference +0\s")
    terminal.child.expect("system 24, turn 1")
    terminal.type("/kvv")
    terminal.child.expect("error: no command called /kvv")
    terminal.child.expect("did you mean /kv?")
    terminal.type("/ti", "\t")  # Tab completes
    terminal.child.send("\r")
    terminal.child.expect("between tokens")
    # The up key shows earlier lines of the history, which is also on disk.
    terminal.type("\x1b[A\x1b[A\x1b[A")
    terminal.child.expect("difference")
    assert terminal.leave() == 0
    assert "+/timing" in (home / "state" / "history").read_text()
    assert (home / "state" / "history").stat().st_mode & 0o077 == 0


@pytest.mark.model
def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(smollm2: Path, home: Path) -> None:
    terminal = Terminal(smollm2, "chat", "--ignore-eos")  # only Ctrl-C ends the answer
    terminal.type("/set predict -1")
    terminal.type("Count from one to a thousand, and on, and on.")
    terminal.child.expect("one to a thousand")
    terminal.child.expect(r"\n\S+ \S+ \S+")  # the answer has begun
    terminal.child.send("\x03")  # the terminal converts it to a signal
    assert terminal.answer().endswith("(stopped by the user)")
    terminal.type("/set predict 4")
    terminal.type("And now?")
    reused = re.search(r"\(\+(\d+) reused\)", terminal.answer())
    assert reused
    assert int(reused[1]) > 40  # the question and the incomplete answer
    assert terminal.leave() == 0


@pytest.mark.model
def test_ctrl_c_at_the_prompt_clears_the_line(terminal: Terminal) -> None:
    terminal.type("half a tho", "\x03")
    terminal.child.expect("Ctrl-D or /exit leaves")
    terminal.type("/show")
    terminal.child.expect("turns +0")
    terminal.type("/exit")
    terminal.child.expect(pexpect.EOF)


@pytest.mark.model
def test_a_message_of_several_lines_by_fence_alt_enter_and_paste(
    terminal: Terminal, home: Path
) -> None:
    terminal.type('"""', "\r")
    terminal.child.expect(r"\.\.\.")
    terminal.child.send('one\rtwo"""\r')
    terminal.answer()
    terminal.type("three\x1b\rfour")
    terminal.answer()
    terminal.type("\x1b[200~five\nsix\x1b[201~")
    terminal.answer()
    assert terminal.leave() == 0
    (log,) = (home / "state" / "sessions").glob("*.jsonl")

    prompts = [json.loads(line)["prompt"] for line in log.read_text().splitlines()]
    assert prompts == ["one\ntwo", "three\nfour", "five\nsix"]


@pytest.mark.model
def test_a_chat_continues_if_nothing_can_be_written_to_disk(smollm2: Path, home: Path) -> None:
    (home / "state").write_text("a file where the folder should be")
    terminal = Terminal(smollm2)
    terminal.type("Hello")
    terminal.child.expect("no history")
    assert "this chat is not logged" in terminal.answer()
    terminal.type("Hello again")
    assert "recorded" not in terminal.answer()  # the warning is printed only once
    assert terminal.leave() == 0


@pytest.mark.model
def test_run_without_a_prompt_on_a_terminal_opens_the_chat(smollm2: Path) -> None:
    terminal = Terminal(smollm2, "run")
    terminal.type("/bye")
    terminal.child.expect(pexpect.EOF)
    terminal.child.close()
    assert terminal.child.exitstatus == 0


@pytest.mark.model
def test_typed_bytes_that_are_not_utf8_become_question_marks(
    terminal: Terminal, home: Path
) -> None:
    terminal.child.expect(READY)
    os.write(terminal.child.child_fd, b"caf\xe9\xff\r")
    terminal.answer()
    assert terminal.leave() == 0
    (log,) = (home / "state" / "sessions").glob("*.jsonl")
    assert json.loads(log.read_text(encoding="utf-8"))["prompt"] == "caf??"


@pytest.mark.model
def test_the_status_line_fits_the_terminal_and_is_updated_after_every_command(
    smollm2: Path,
) -> None:
    terminal = Terminal(smollm2, PROMPT_TOOLKIT_NO_CPR="0", NO_COLOR="1")
    child = terminal.child

    def read_bar() -> str:
        """Return the status line of the next prompt. prompt_toolkit draws it after it has received
        the position of the cursor.
        """
        child.expect(r"\x1b\[6n")
        child.send("\x1b[5;1R")
        child.expect(r"(\d+)/2048 tokens[^\n]*temp [0-9.]+")
        return ESCAPE.sub("", (child.before or "") + str(child.after))

    assert "24/2048 tokens · KV 0 B · temp 0" in read_bar()
    child.send("Hello\r")
    assert "+0 reused" in terminal.answer()
    bar_text = read_bar()
    assert re.search(
        r"█░+ · \d\d/2048 tokens · KV [0-9.]+ (Ki|Mi)B · [0-9.]+ tok/s · temp 0$", bar_text
    )
    child.send("/set temp 0.25\r")
    assert "temp 0.25" in read_bar()
    child.setwinsize(24, 30)  # the kernel sends a signal
    child.expect(r"\x1b\[6n")
    child.send("\x1b[5;1R")
    child.expect(r"\d\d/2048 tokens")
    child.expect(r"tok/s")
    child.send("/set temp 0.5\r")
    child.expect(r"temp = 0.5")
    child.expect(r"\x1b\[6n")
    child.send("\x1b[5;1R")
    child.expect(r"/2048 tokens[^\n]*?\x1b")
    assert "temp" not in str(child.after)  # it does not fit
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.model
def test_the_completion_menu_shows_descriptions(smollm2: Path) -> None:
    terminal = Terminal(smollm2, PROMPT_TOOLKIT_NO_CPR="0")
    child = terminal.child
    child.expect(r"\x1b\[6n")
    child.send("\x1b[1;1R")
    child.expect("temp 0")
    child.send("/set timing \t")
    child.expect("the milliseconds of every token")
    child.send("\t\r")  # the next Tab selects the first word of the menu
    child.expect("timing = off")
    child.expect(r"\x1b\[6n")
    child.send("\x1b[1;1R")
    child.expect("2048 tokens")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
