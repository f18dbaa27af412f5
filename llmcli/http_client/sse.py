"""Parses Server-Sent Events (SSE) whose data is JSON.

The server is not trusted: an event that is longer than MAX_EVENT_BYTES, or whose data is not a JSON
object, raises BadStreamError.
"""

import json
from collections.abc import Iterator
from typing import Any

MAX_EVENT_BYTES = 1 << 22  # largest size of one event


class BadStreamError(Exception):
    """The server sent data that is too long or is not a JSON object. The message is shown to
    users.
    """


class EventDecoder:
    """Splits a byte stream, received in chunks of any size, into the data of its events."""

    def __init__(self) -> None:
        self.buffer = b""  # the bytes received after the last complete event

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is complete once `received` is appended. The bytes of
        an incomplete event are stored for the next call. An event's data is the text of its `data:`
        lines; events without such lines, for example comments, are skipped. Raises BadStreamError
        if the incomplete event is longer than MAX_EVENT_BYTES.
        """
        buffer = self.buffer + received
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *complete, self.buffer = buffer.split(b"\n\n")
        if len(self.buffer) > MAX_EVENT_BYTES:
            raise BadStreamError("an event of the stream does not end")
        for event in complete:
            if event.startswith(b"data:") and b"\n" not in event:
                yield event[5:].strip()
            elif data := [
                line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")
            ]:
                yield b"\n".join(data)


def parse_event(data: bytes) -> dict[str, Any]:
    """Parse the data of an event, or the body of a response, as a JSON object. Raises
    BadStreamError for anything else.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadStreamError(f"the stream contains invalid JSON: {data[:80]!r}") from None
    if not isinstance(value, dict):
        raise BadStreamError(f"the stream contains an entry that is not an object: {data[:80]!r}")
    return value
