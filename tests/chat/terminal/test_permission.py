"""The question before a call of a tool, at a real terminal."""

import sys

import pexpect
import pytest

PROGRAM = """
from llmcli.chat.terminal.permission import find_asker
from llmcli.runtime.interrupt import defer_interrupts
ask = find_asker()
with defer_interrupts():
    try:
        print("answer:", ask("call add? "))
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize(
    ("keys", "printed"),
    [
        ("y\r", "answer: once"),
        ("ALWAYS\r", "answer: always"),
        ("what\rn\r", "answer: no"),
        ("\x04", "answer: no"),
        ("\x03", "interrupted"),
    ],
)
def test_the_answer_of_the_user(keys: str, printed: str) -> None:
    child = pexpect.spawn(sys.executable, ["-c", PROGRAM], encoding="utf-8", timeout=60)
    child.expect_exact("call add? ")
    child.send(keys)
    child.expect_exact(printed)
    child.expect(pexpect.EOF)
