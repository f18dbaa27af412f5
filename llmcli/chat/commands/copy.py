"""/copy: copies the last answer to the clipboard."""

import sys

from llmcli.chat import clipboard
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.conversation.answer import split_answer
from llmcli.errors import UserError
from llmcli.ui import write_now
from llmcli.units import format_count


def copy_answer(chat: ChatSession, argument: str) -> None:
    """Copy the last answer to the clipboard, without its thinking.

    Both a clipboard program of the desktop (pbcopy, wl-copy, xclip, xsel), if one is installed, and
    the terminal's escape sequence OSC 52 are used. Over ssh, the escape sequence reaches the
    clipboard of your own machine, if your terminal allows it.
    """
    if argument:
        raise UserError(
            f"/copy takes no argument: {argument}",
            hint="use /copy alone; /export md FILE writes all answers",
        )
    answers = [
        message.content
        for message in chat.conversation.messages
        if message.role == "assistant" and not message.template_fields
    ]
    if not answers:
        raise UserError("there is no answer yet", hint="ask something first")
    if chat.ui.json or not sys.stdout.isatty():
        raise UserError(
            "copying needs a terminal",
            hint="/export md FILE writes the conversation",
        )
    text = split_answer(answers[-1]).content
    methods = [program] if (program := clipboard.copy_text(text)) else []
    if sequence := clipboard.terminal_sequence(text):
        write_now(sys.stdout, sequence)
        methods.append("the terminal, if it allows that (OSC 52)")
    if not methods:
        raise UserError(
            f"the answer has {len(text)} characters, too many for the terminal's clipboard",
            hint="install wl-copy, xclip or xsel, or use /export md FILE",
        )
    chat.ui.text(f"copied {format_count(len(text), 'character')} with {' and '.join(methods)}")


COMMANDS = (ReplCommand("copy", copy_answer, group="files"),)
