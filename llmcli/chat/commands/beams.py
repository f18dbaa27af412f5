"""/beams: the results of a beam search."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.display.styles import escape_line
from llmcli.errors import UserError


def show_beams(chat: ChatSession, argument: str) -> None:
    """Show all answers that the last beam search found, and their scores."""
    chat.model.require_runner()
    if chat.last_answer is None or not chat.last_answer.beams:
        raise UserError(
            "the last answer was not a beam search", hint="start with --beams 4, then ask"
        )
    rows = [
        (str(number), f"{beam.score:.4f}", escape_line(beam.text))
        for number, beam in enumerate(chat.last_answer.beams, 1)
    ]
    chat.ui.table(("#", "score", "text"), rows, right=("#", "score"))


COMMANDS = (ReplCommand("beams", show_beams, group="inside the model"),)
