"""Asks the user a question with a short answer, in the middle of a line-by-line conversation."""

import sys

from llmcli import terminal_mode, terminal_status
from llmcli.chat.tools.chat_tools import AskUser, Permission
from llmcli.runtime.interrupt import allow_interrupts
from llmcli.ui import escape_controls, write_now

ANSWERS: dict[str, Permission] = {
    "y": "once",
    "yes": "once",
    "a": "always",
    "always": "always",
    "n": "no",
    "no": "no",
}


def find_asker() -> AskUser | None:
    """Return the function that asks the user, or None if there is no terminal to ask at."""
    return ask_permission if sys.stdin.isatty() and sys.stderr.isatty() else None


def ask_permission(question: str) -> Permission:
    """Show a question until the user answers it. The end of the input means no. Keys that were
    typed before the question are discarded: they were not meant for it. Raises KeyboardInterrupt
    after Ctrl-C.
    """
    terminal_status.end()
    mode = terminal_mode.read_mode()
    if mode is not None:
        terminal_mode.enable_echo(mode)
        terminal_mode.discard_input()
    try:
        with allow_interrupts():
            while True:
                write_now(sys.stderr, escape_controls(question))
                line = sys.stdin.buffer.readline()
                if not line:
                    write_now(sys.stderr, "\n")
                    return "no"
                answer = ANSWERS.get(line.decode("ascii", "replace").strip().lower())
                if answer:
                    return answer
    finally:
        if mode is not None:
            terminal_mode.restore_mode(mode)
