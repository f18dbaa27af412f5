"""Reads a streamed chat completion. The server is not trusted: fields of a wrong type count as
absent, and lengths are limited.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from llmcli.http_client import openai_stream, sse
from llmcli.http_client.client import RequestError
from llmcli.http_client.openai_stream import TokenUsage
from llmcli.runtime.sampling.top_logprobs import MAX_TOP_LOGPROBS

MAX_ANSWER_CHARS = 1 << 21  # the reading of a longer answer ends with an error
MAX_SHOWN_CHARS = 80  # of a body that is not a stream
THINKING_FIELDS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text and log-probability, which is None if unknown, and those of the likeliest
    tokens at its position.
    """

    text: str
    logprob: float | None
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A chunk of an answer.

    - `time`: `time.perf_counter()` of its arrival.
    - `thinking`, `content`: the text of each kind in it.
    - `tokens`: its tokens, if the server sends log-probabilities.
    - `finish`: why the answer ended, in the server's word, or "".
    - `usage`: the token counts, in the last chunk of most servers.
    """

    time: float
    thinking: str = ""
    content: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish: str = ""
    usage: TokenUsage | None = None


def read_chunks(pieces: Iterable[tuple[float, bytes]]) -> Iterator[AnswerChunk]:
    """Yield the chunks of a response body, whose pieces come with the times of their arrival.

    Raises RequestError if the server reports an error, ends the stream before the answer, sends
    something else than a stream of chunks, or sends more than MAX_ANSWER_CHARS. A body without a
    stream is read as one chunk, since some servers ignore the field `stream`.
    """
    events, has_ended, n_chars, start = sse.EventDecoder(), False, 0, b""
    arrival = 0.0
    try:
        for arrival, piece in pieces:
            start = start or piece[:MAX_SHOWN_CHARS]
            for data in events.feed(piece):
                if data == openai_stream.DONE_MARK:
                    return
                chunk = _read_chunk(sse.parse_event(data), arrival)
                n_chars += len(chunk.thinking) + len(chunk.content) + len(chunk.tokens)
                has_ended = has_ended or bool(chunk.finish)
                yield chunk
                if n_chars > MAX_ANSWER_CHARS:
                    raise RequestError(
                        "bad stream", f"the answer has more than {MAX_ANSWER_CHARS:,} characters"
                    )
        if has_ended:
            return
        if events.buffer.lstrip().startswith(b"{"):
            yield _read_chunk(sse.parse_event(events.buffer), arrival, "message")
            return
    except sse.BadStreamError as error:
        raise RequestError("bad stream", str(error)) from None
    if start and not start.lstrip().startswith((b"data:", b":", b"event:", b"id:", b"retry:")):
        text = start.decode("utf-8", "replace")
        raise RequestError("bad stream", f"the response is not an event stream: {text!r}")
    raise RequestError("broken off", "the server ended the stream before the answer was complete")


def _read_chunk(document: dict[str, Any], arrival: float, part: str = "delta") -> AnswerChunk:
    """Return the first choice of a chunk. `part`: the field of the choice with the text. Raises
    RequestError for an error message.
    """
    if message := openai_stream.read_error_message(document):
        raise RequestError("error in the stream", message)
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    choice = choice if isinstance(choice, dict) else {}
    delta = choice.get(part)
    delta = delta if isinstance(delta, dict) else {}
    finish = choice.get("finish_reason")
    return AnswerChunk(
        arrival,
        next((text for name in THINKING_FIELDS if (text := _read_text(delta.get(name)))), ""),
        _read_text(delta.get("content")),
        _read_tokens(choice.get("logprobs")),
        finish[:MAX_SHOWN_CHARS] if isinstance(finish, str) else "",
        openai_stream.read_usage(document),
    )


def _read_text(value: object) -> str:
    """Return a text, in which half characters (lone surrogates) are replaced, or "" for anything
    else.
    """
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _read_tokens(logprobs: object) -> tuple[ScoredToken, ...]:
    """Return the tokens in the field `logprobs` of a choice. Empty if one of them is invalid."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list):
        return ()
    tokens = []
    for entry in entries:
        scored = _read_pair(entry)
        if scored is None:
            return ()
        likeliest = entry.get("top_logprobs")
        pairs = map(_read_pair, likeliest[:MAX_TOP_LOGPROBS] if isinstance(likeliest, list) else ())
        tokens.append(ScoredToken(*scored, tuple(pair for pair in pairs if pair)))
    return tuple(tokens)


def _read_pair(entry: object) -> tuple[str, float] | None:
    """Return the text and log-probability of a token, or None if they are invalid."""
    if not isinstance(entry, dict):
        return None
    text, logprob = entry.get("token"), entry.get("logprob")
    if not isinstance(text, str) or isinstance(logprob, bool):
        return None
    if not isinstance(logprob, int | float) or not math.isfinite(logprob) or logprob > 1e-3:
        return None
    return _read_text(text), float(logprob)
