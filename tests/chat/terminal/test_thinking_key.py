"""Ctrl-G ends the thinking of the running answer in a real terminal, and only that."""

import re
from pathlib import Path

import pexpect
import pytest

from tests.chat.terminal.test_hangup import READY, start_chat

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


@pytest.fixture
def thinking_template(tmp_path: Path) -> Path:
    """A chat template after which every answer begins inside its thinking."""
    path = tmp_path / "thinking.jinja"
    path.write_text(TEMPLATE)
    return path


def test_ctrl_g_ends_the_thinking(stories_gguf: Path, home: Path, thinking_template: Path) -> None:
    child = start_chat(
        stories_gguf,
        *("--chat-template", str(thinking_template), "--ignore-eos", "--endless", "--temp", "0"),
        *("-n", "100000", "--on-full", "sinks"),
    )
    child.expect(READY)
    child.send("Once upon a time\r")
    child.expect(re.escape("\x1b[?2004l"))  # the prompt has ended, and the answer follows
    child.expect(r"(\S+\s+){5}")
    child.send("\x07")
    child.expect(re.escape("</think>"))
    child.expect(r"(\S+\s+){5}")  # the reply goes on
    child.send("\x03")
    child.expect(r"ttfo \d+ ms after \d+ thinking tok")
    child.expect(READY)
    child.send("\x07")  # at the prompt it does not end the program
    child.send("/exit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
