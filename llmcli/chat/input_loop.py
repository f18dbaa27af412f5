"""The input loop: runs lines that are commands, and sends all others to the model.

Input from a pipe is read here; the REPL in repl.py handles terminals.
"""

from collections.abc import Iterator
from typing import AnyStr, BinaryIO

from llmcli.chat import commands
from llmcli.chat.ask import FENCE, ask_and_print, strip_fences
from llmcli.chat.chat_session import ChatSession
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer
from llmcli.text_input import decode_utf8


def handle_line(chat: ChatSession, text: str) -> Answer | None:
    """Handle one line: run a command, or send a message. Returns the answer to a message."""
    content = parse_message(text)
    if content is None:
        commands.run_command(chat, text)
        chat.log.record_position(chat.conversation, chat.name)
        return None
    return ask_and_print(chat, chat.with_attachments(content)) if content.strip() else None


def parse_message(text: str) -> str | None:
    """Return the message in a line; None for a command.

    A message that begins with a slash must be typed with two slashes, or between fences.
    """
    if text.startswith(FENCE):
        return strip_fences(text)
    if text.startswith("//"):
        return text[1:]
    return None if text.startswith("/") else text


def run_pipe(chat: ChatSession, source: BinaryIO) -> bool:
    """Handle each line of `source` as a message or command; return whether all succeeded.

    An error in one line is printed, and the next line is handled. Ctrl-C during an answer ends the
    whole input with KeyboardInterrupt.
    """
    succeeded = True
    for raw, offset in _blocks(source):
        try:
            reply = handle_line(
                chat, decode_utf8(raw, "stdin", offset, "that message is skipped; ").strip("\r\n")
            )
        except UserError as error:
            chat.ui.error(str(error), error.hint)
            succeeded = False
            continue
        if reply and reply.finish == "cancelled":
            raise KeyboardInterrupt
        if chat.should_exit:
            break
    return succeeded


def is_closed(text: str) -> bool:
    """Return whether a text is complete: if it begins with a fence, it also ends with one."""
    return _is_complete(text.strip(), FENCE)


def _is_complete(body: AnyStr, fence: AnyStr) -> bool:
    return not body.startswith(fence) or (len(body) >= 2 * len(fence) and body.endswith(fence))


def _blocks(source: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of `source` with their byte offsets; lines between two fences are joined."""
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
