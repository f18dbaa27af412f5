"""Reads the JSON of OpenAI's completion APIs: the tokens of a stream's chunks, the token counts,
and error messages.

The fields come from an untrusted server: a field of the wrong type is read as absent.
"""

from dataclasses import dataclass
from typing import Any

DONE_MARK = b"[DONE]"  # the data of the event that ends a stream


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts that a server reported for one request: of the prompt, of the output, and
    of the prompt tokens read from a cache. None: not reported.
    """

    prompt: int | None
    output: int | None
    cached: int | None


def count_tokens(chunk: dict[str, Any]) -> tuple[int, str | None]:
    """Return the number of output tokens in a chunk, and the finish reason if the chunk has one.

    The number is the length of the chunk's list of token ids or log probabilities. Without such a
    list, a chunk with text (or a tool call) counts as one token. A chunk without text, for example
    one with only a role or the token counts, has 0 tokens.
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
    logprob_list = (
        logprobs.get("content") or logprobs.get("tokens") if isinstance(logprobs, dict) else None
    )
    ids = choice.get("token_ids") or chunk.get("tokens") or logprob_list
    return (len(ids) if isinstance(ids, list) else 1), finish


def read_model_entries(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a list of models (`GET /v1/models`) whose `id` is a text."""
    data = document.get("data")
    entries = data if isinstance(data, list) else []
    return [
        entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]


def has_reply(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk has text of the reply or a tool call, which thinking is not."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    content = delta if isinstance(delta, dict) else choices[0]
    return any(content.get(name) for name in ("content", "text", "tool_calls"))


def read_usage(body: dict[str, Any]) -> TokenUsage | None:
    """Return the token counts in the `usage` field of a response or of a stream's last chunk, or
    None without that field.
    """
    counts = body.get("usage")
    if not isinstance(counts, dict):
        return None
    details = counts.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(
        _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")), _count(cached)
    )


def read_error_message(body: dict[str, Any]) -> str:
    """Return the message in the `error` field of a response or a chunk, or "" without that field.
    Long messages are cut.
    """
    error = body.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("type")
    return str(error)[:500] if error else ""


def _count(value: Any) -> int | None:
    """Return a value that is a plausible token count, or else None."""
    return value if type(value) is int and 0 <= value < 2**40 else None
