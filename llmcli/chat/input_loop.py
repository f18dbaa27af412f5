"""Handles the input of a chat: a line that starts with a slash is a command, every other line is a
message to the model.

Also reads the input if it is a pipe. A terminal is read by terminal/repl.py.
"""

from collections.abc import Iterator
from typing import AnyStr, BinaryIO

from llmcli.chat import commands
from llmcli.chat.ask import FENCE, ask_and_print, strip_fences
from llmcli.chat.chat_session import ChatSession
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer
from llmcli.text_input import decode_text


def handle_line(chat: ChatSession, text: str) -> Answer | None:
    """Run the command or send the message in `text`. Return the answer to a message; None for a
    command or an empty line. Raises UserError if the command or the message fails.
    """
    content = parse_message(text)
    if content is None:
        commands.run_command(chat, text)
        chat.record_position()
        return None
    return ask_and_print(chat, chat.with_attachments(content)) if content.strip() else None


def parse_message(text: str) -> str | None:
    """Return the message that the user typed as `text`, or None if it is a command. The fences
    around a message of several lines are removed, and two slashes at its start become one.
    """
    if text.startswith(FENCE):
        return strip_fences(text)
    if text.startswith("//"):
        return text[1:]
    return None if text.startswith("/") else text


def run_pipe(chat: ChatSession, source: BinaryIO) -> bool:
    """Handle every line of `source` as a message or a command. Print an error and go on with the
    next line if one fails. Return whether all lines succeeded.

    Raises KeyboardInterrupt if Ctrl-C stops an answer.
    """
    succeeded = True
    for raw, offset in _read_messages(source):
        try:
            message = decode_text(
                raw, "stdin", start=offset, hint_prefix="that message is skipped; "
            )
            reply = handle_line(chat, message.strip("\r\n"))
        except UserError as error:
            chat.ui.error(str(error), error.hint)
            succeeded = False
            continue
        if reply and reply.finish == "cancelled":
            raise KeyboardInterrupt
        succeeded = succeeded and not (reply and reply.error)
        if chat.should_exit:
            break
    return succeeded


def is_closed(text: str) -> bool:
    """Return whether typed text is a complete message. It is not if it begins with a fence (triple
    quotes) and does not end with one.
    """
    return _is_complete(text.strip(), FENCE)


def _is_complete(body: AnyStr, fence: AnyStr) -> bool:
    """Return whether `body` is complete, as is_closed does. For str and for bytes."""
    return not body.startswith(fence) or (len(body) >= 2 * len(fence) and body.endswith(fence))


def _read_messages(source: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each message or command of `source` with its byte offset. It is one line, or all lines
    from a fence to the next fence.
    """
    fence, pending, start, offset = FENCE.encode(), b"", 0, 0
    while line := source.readline():
        start = start if pending else offset
        offset += len(line)
        pending += line
        if _is_complete(pending.strip(), fence):
            yield pending, start
            pending = b""
    if pending:
        yield pending, start
