"""Server-sent events, and what a chunk of OpenAI's stream says. It knows nothing of connections.

What a server sends is untrusted: an event longer than MOST, or one that is no JSON object, is an
error of that request.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST = 1 << 22  # bytes of one event
DONE = b"[DONE]"


class BadStream(Exception):
    """What came is no stream of OpenAI's; the message is for people."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted."""

    prompt: int | None
    output: int | None
    cached: int | None


class Events:
    """Bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that is complete now. Raises BadStream."""
        buffer = self.rest + piece
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *whole, self.rest = buffer.split(b"\n\n")
        if len(self.rest) > MOST:
            raise BadStream("an event of its stream has no end")
        for event in whole:
            if event.startswith(b"data:") and b"\n" not in event:
                yield event[5:].strip()
            elif data := [
                line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")
            ]:
                yield b"\n".join(data)


def parsed(data: bytes) -> dict[str, Any]:
    """The object of one event. Raises BadStream."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise BadStream(f"its stream holds what is no JSON: {data[:80]!r}") from None
    if not isinstance(found, dict):
        raise BadStream(f"its stream holds what is no object: {data[:80]!r}")
    return found


def tokens(chunk: dict[str, Any]) -> tuple[int, str | None]:
    """Tokens with text in a chunk, and why the answer ended; 0 for a chunk without text (the role,
    the usage).

    A server that tells the ids of a chunk, or a logprob for each token, is believed; else a chunk
    is one token.
    """
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return 0, None
    choice = choices[0]
    reason = choice.get("finish_reason")
    finish = reason if isinstance(reason, str) else None
    delta = choice.get("delta")
    held = delta if isinstance(delta, dict) else choice
    if not any(
        held.get(name)
        for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls")
    ):
        return 0, finish
    logprobs = choice.get("logprobs")
    told = logprobs.get("content") or logprobs.get("tokens") if isinstance(logprobs, dict) else None
    ids = choice.get("token_ids") or chunk.get("tokens") or told
    return (len(ids) if isinstance(ids, list) else 1), finish


def usage(chunk: dict[str, Any]) -> Usage | None:
    """What an answer, or the last chunk of one, says of its tokens."""
    told = chunk.get("usage")
    if not isinstance(told, dict):
        return None
    details = told.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _count(told.get("prompt_tokens")), _count(told.get("completion_tokens")), _count(cached)
    )


def complaint(body: dict[str, Any]) -> str:
    """What an error object says; empty where there is none."""
    error = body.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("type")
    return str(error)[:500] if error else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**40 else None
