"""One line after the other: commands are done, everything else is answered.

It reads from a pipe; the terminal is repl.py's. What lines mean is decided here for both.
"""

from collections.abc import Iterator
from typing import BinaryIO

from llmcli.chat import commands
from llmcli.chat.ask import FENCE, answer, unfenced
from llmcli.chat.chat_session import Talk
from llmcli.runtime.requests.request import Answer
from llmcli.text_input import decoded
from quant.errors import Refusal


def say(talk: Talk, text: str) -> Answer | None:
    """Do one line: a command after a slash, else a message. Two slashes, or a fence, make any text
    a message.
    """
    said = message(text)
    if said is None:
        commands.perform(talk, text)
        talk.log.moved(talk.session, talk.name)
        return None
    return answer(talk, talk.message(said)) if said.strip() else None


def message(text: str) -> str | None:
    """The message that a line is; None for a command."""
    if text.startswith(FENCE):
        return unfenced(text)
    if text.startswith("//"):
        return text[1:]
    return None if text.startswith("/") else text


def pipe(talk: Talk, source: BinaryIO) -> bool:
    """Answer a message a line until the end of `source`; whether all went well.

    An error in one line is told and the next line goes on; Ctrl-C in an answer ends all.
    """
    good = True
    for raw, offset in _blocks(source):
        try:
            made = say(
                talk, decoded(raw, "stdin", offset, "that message is left out; ").strip("\r\n")
            )
        except Refusal as error:
            talk.ui.error(str(error), error.hint)
            good = False
            continue
        if made and made.finish == "cancelled":
            raise KeyboardInterrupt
        if talk.leaving:
            break
    return good


def closed(text: str) -> bool:
    """Whether a text is complete: not begun with a fence, or ended with one, too."""
    body = text.strip()
    return not body.startswith(FENCE) or (len(body) >= 2 * len(FENCE) and body.endswith(FENCE))


def _blocks(source: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Lines and their byte offsets; lines between fences come as one."""
    fence, held, begun, offset = FENCE.encode(), b"", 0, 0
    while line := source.readline():
        begun = begun if held else offset
        offset += len(line)
        held += line
        body = held.strip()
        if not body.startswith(fence) or (len(body) >= 2 * len(fence) and body.endswith(fence)):
            yield held, begun
            held = b""
    if held:
        yield held, begun
