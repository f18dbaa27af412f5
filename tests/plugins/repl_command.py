"""/length: how long the last answer is."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError


def count_words(session: ChatSession, rest: str) -> None:
    """Count the words of the last answer."""
    if session.last_answer is None:
        raise UserError("there is no answer yet", hint="ask something first")
    session.ui.text(f"{len(session.last_answer.text.split()):,} words")


COMMANDS = (ReplCommand("length", count_words, group="inside the model"),)
