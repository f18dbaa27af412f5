"""/copy: the last answer to the clipboard."""

import base64
import sys

from llmcli.chat import clipboard
from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.errors import UserError
from llmcli.runtime.text.reasoning import split
from llmcli.ui import put

MOST = 74_994  # bytes of base64 that xterm takes in one sequence; others take more


def copy(talk: Talk, rest: str) -> None:
    """Copy the last answer to the clipboard, without what was thought before it.

    Through the desktop's own program where there is one (pbcopy, wl-copy, xclip, xsel), and through
    the terminal (OSC 52), which reaches your clipboard over ssh, too, where the terminal allows it.
    """
    if rest:
        raise UserError(
            f"/copy takes no argument: {rest}",
            hint="/copy alone; /export md FILE writes all answers",
        )
    answers = [
        split(message.content)[1]
        for message in talk.session.messages
        if message.role == "assistant"
    ]
    if not answers:
        raise UserError("there is no answer yet", hint="ask something first")
    if talk.ui.json or not sys.stdout.isatty():
        raise UserError(
            "there is no terminal, and so no clipboard",
            hint="/export md FILE writes the conversation",
        )
    text = answers[-1]
    ways = [program] if (program := clipboard.copy(text)) else []
    sequence = base64.b64encode(text.encode("utf-8", "replace")).decode()
    if len(sequence) <= MOST:
        put(sys.stdout, f"\x1b]52;c;{sequence}\x07")
        ways.append("the terminal, if it allows that (OSC 52)")
    if not ways:
        raise UserError(
            f"the answer has {len(text)} characters: too many for the terminal's clipboard",
            hint="install wl-copy, xclip or xsel, or /export md FILE",
        )
    talk.ui.text(f"copied {len(text)} characters through {' and '.join(ways)}")


COMMANDS = (Command("copy", copy, group="files"),)
