"""Requests that are read from a file. Supported formats: OpenAI batch lines, ShareGPT
conversations, lines with a prompt or messages, and lines with a JSON string.

The file is untrusted input. Error messages contain the number of the invalid line.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli import text_input
from llmcli.bench.load import mixes
from llmcli.bench.load.mixes import RequestLengths
from llmcli.bench.load.records import LoadJob
from llmcli.errors import UserError
from quant.json_dataclasses import parse_value

MAX_FILE_BYTES = 1 << 28
ROLE_NAMES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
FORMAT_HINT = (
    'each line is {"prompt": "…"}, {"messages": […]}, {"conversations": […]}, '
    "or a line of OpenAI's batch format"
)


def read_requests(path: Path, shape: RequestLengths) -> list[LoadJob]:
    """Return the requests of a file in their order. A request that does not state the length of its
    answer gets `shape.output_tokens`. Raises UserError.
    """
    text = text_input.read_text(
        path,
        max_bytes=MAX_FILE_BYTES,
        hint="--mix takes fixed, sonnet or a JSONL file",
        size_hint="use fewer lines: head -n 10000",
    )
    jobs = [_parse_request(row, shape, f"{path}:{number}") for number, row in _rows(text, path)]
    if not jobs:
        raise UserError(f"{path} contains no request", hint=FORMAT_HINT)
    return jobs


def replay_requests(jobs: Sequence[LoadJob], shape: RequestLengths, seed: int) -> Iterator[LoadJob]:
    """Yield the requests of a file endlessly. All requests occur once in random order, then again
    in a new random order.
    """
    rng = random.Random(f"{seed} file")
    while True:
        for job in rng.sample(jobs, len(jobs)):
            yield replace(job, cancel_after=mixes.draw_cancellation(shape, job.max_tokens, rng))


def _rows(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the parsed JSON value of each line, or of each element if the text is a
    JSON array.
    """
    is_array = text.lstrip().startswith("[")  # ShareGPT data is published as one JSON array
    # split("\n"), because splitlines() would also split at U+2028 inside a text
    numbered_texts = [(1, text)] if is_array else list(enumerate(text.split("\n"), 1))
    for number, piece in numbered_texts:
        if not piece.strip():
            continue
        try:
            row = parse_value(piece, MAX_FILE_BYTES)
        except ValueError:
            raise UserError(f"{path}:{number} is not valid JSON", hint=FORMAT_HINT) from None
        yield from enumerate(row, 1) if is_array and isinstance(row, list) else [(number, row)]


def _parse_request(row: Any, shape: RequestLengths, where: str) -> LoadJob:
    """Convert a parsed JSON value to a request. `where`: the file and line for error messages.
    Raises UserError.
    """
    if isinstance(row, str):  # a JSON string is a prompt, as in `batch`
        return LoadJob(row, shape.output_tokens)
    body = row.get("body", row) if isinstance(row, dict) else None
    if not isinstance(body, dict):
        raise UserError(f"{where} is not a request", hint=FORMAT_HINT)
    length = body.get("max_completion_tokens", body.get("max_tokens", body.get("output_tokens")))
    output = length if type(length) is int and length > 0 else shape.output_tokens
    if isinstance(body.get("prompt"), str):
        return LoadJob(body["prompt"], output)
    if isinstance(body.get("conversations"), list):
        return LoadJob("", output, messages=_parse_conversation(body["conversations"], where))
    if isinstance(body.get("turns"), list) and body["turns"]:
        return LoadJob(str(body["turns"][0]), output)
    messages = body.get("messages")
    if (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) for message in messages)
    ):
        return LoadJob("", output, messages=messages)
    raise UserError(f"{where} is not a request", hint=FORMAT_HINT)


def _parse_conversation(turns: list[Any], where: str) -> list[dict[str, str]]:
    """Return a ShareGPT conversation as chat messages. Messages after the last user message are
    removed, because the model should answer that message.
    """
    messages = []
    for turn in turns:
        role = ROLE_NAMES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise UserError(
                f"{where} contains an invalid turn", hint='{"from": "human", "value": "…"}'
            )
        messages.append({"role": role, "content": turn["value"]})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise UserError(f"{where} contains no user message", hint=FORMAT_HINT)
    return messages
