"""/length: how long the last answer is."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.errors import UserError


def count_words(talk: Talk, rest: str) -> None:
    """Count the words of the last answer."""
    if talk.last is None:
        raise UserError("there is no answer yet", hint="ask something first")
    talk.ui.text(f"{len(talk.last.text.split()):,} words")


COMMANDS = (Command("length", count_words, group="inside the model"),)
