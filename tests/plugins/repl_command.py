"""The REPL command /length: the number of words in the last answer."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError


def count_words(session: ChatSession, rest: str) -> None:
    """Print the number of words in the last answer. Raises UserError if there is none."""
    if session.last_answer is None:
        raise UserError("there is no answer yet", hint="ask something first")
    session.ui.text(f"{len(session.last_answer.text.split()):,} words")


COMMANDS = (ReplCommand("length", count_words, group="inside the model"),)
