"""/beams: the results of a beam search."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display.styles import one_line
from llmcli.errors import UserError


def show_beams(chat: Talk, rest: str) -> None:
    """Show all answers that the last beam search found, and their scores."""
    if chat.last is None or not chat.last.beams:
        raise UserError(
            "the last answer was not a beam search", hint="start with --beams 4, then ask"
        )
    rows = [
        (str(number), f"{beam.score:.4f}", one_line(beam.text))
        for number, beam in enumerate(chat.last.beams, 1)
    ]
    chat.ui.table(("#", "score", "text"), rows, right=("#", "score"))


COMMANDS = (Command("beams", show_beams, group="inside the model"),)
