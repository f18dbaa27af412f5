"""Server-Sent Events, and the content of the chunks of OpenAI's stream format.

The server's data is not trusted: an event that is longer than MAX_EVENT_BYTES or is not a JSON
object makes its request fail.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_EVENT_BYTES = 1 << 22  # largest size of one event
DONE_MARK = b"[DONE]"


class BadStreamError(Exception):
    """The data is not a stream in OpenAI's format. The error's message is shown to users."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts that the server reported. A value is None if the server did not report it."""

    prompt: int | None
    output: int | None
    cached: int | None


class EventDecoder:
    """Collects received bytes, and splits them into the data of complete events."""

    def __init__(self) -> None:
        self.buffer = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Add received bytes and yield the data of each event that they complete. Raises
        BadStreamError.
        """
        buffer = self.buffer + piece
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
    """Return the JSON object of one event. Raises BadStreamError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadStreamError(f"the stream contains invalid JSON: {data[:80]!r}") from None
    if not isinstance(value, dict):
        raise BadStreamError(f"the stream contains an entry that is not an object: {data[:80]!r}")
    return value


def count_tokens(chunk: dict[str, Any]) -> tuple[int, str | None]:
    """Return the number of a chunk's tokens with text, and the finish reason. A chunk without text
    (role, token counts) has 0 tokens.

    The tokens are counted by the chunk's ids or logprobs. Without these, a chunk with text counts
    as one token.
    """
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return 0, None
    choice = choices[0]
    reason = choice.get("finish_reason")
    finish = reason if isinstance(reason, str) else None
    delta = choice.get("delta")
    content = delta if isinstance(delta, dict) else choice
    if not any(
        content.get(name)
        for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls")
    ):
        return 0, finish
    logprobs = choice.get("logprobs")
    listed = (
        logprobs.get("content") or logprobs.get("tokens") if isinstance(logprobs, dict) else None
    )
    ids = choice.get("token_ids") or chunk.get("tokens") or listed
    return (len(ids) if isinstance(ids, list) else 1), finish


def read_usage(chunk: dict[str, Any]) -> TokenUsage | None:
    """Return the token counts in a response or in the last chunk of a stream; None if there are
    none.
    """
    counts = chunk.get("usage")
    if not isinstance(counts, dict):
        return None
    details = counts.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(
        _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")), _count(cached)
    )


def read_error_message(body: dict[str, Any]) -> str:
    """Return the message of a response's error object; empty if there is no error object."""
    error = body.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("type")
    return str(error)[:500] if error else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**40 else None
