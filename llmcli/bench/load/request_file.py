"""Requests from a file. Its format may be OpenAI batch lines, ShareGPT conversations, lines with a
prompt or messages, or plain prompts.

The file is untrusted input. An error message states the number of the invalid line.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.bench.load import mixes
from llmcli.bench.load.mixes import RequestLengths
from llmcli.bench.load.records import LoadJob
from llmcli.errors import UserError

MAX_FILE_BYTES = 1 << 30
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
    """Return the requests of a file in the order of the file. A request without a length of its own
    gets `shape.output_tokens`. Raises UserError.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(
                f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB",
                hint="use fewer lines: head -n 10000",
            )
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"cannot read {path}: {reason}", hint="--mix takes fixed, sonnet or a JSONL file"
        ) from None
    jobs = [_job(row, shape, f"{path}:{number}") for number, row in _rows(text, path)]
    if not jobs:
        raise UserError(f"{path} contains no request", hint=FORMAT_HINT)
    return jobs


def replay_requests(jobs: Sequence[LoadJob], shape: RequestLengths, seed: int) -> Iterator[LoadJob]:
    """Yield the jobs of a file endlessly: each job once in random order, then each again in a new
    order.
    """
    rng = random.Random(f"{seed} file")
    while True:
        for job in rng.sample(jobs, len(jobs)):
            yield replace(job, cancel_after=mixes.draw_cancellation(shape, job.max_tokens, rng))


def _rows(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    is_array = text.lstrip().startswith("[")  # ShareGPT data is published as one JSON array
    # split("\n"), because splitlines() would also split at U+2028 inside a text
    pieces = [(1, text)] if is_array else list(enumerate(text.split("\n"), 1))
    for number, piece in pieces:
        if not piece.strip():
            continue
        try:
            row = json.loads(piece)
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number} is not valid JSON", hint=FORMAT_HINT) from None
        yield from enumerate(row, 1) if is_array and isinstance(row, list) else [(number, row)]


def _job(row: Any, shape: RequestLengths, where: str) -> LoadJob:
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
        return LoadJob("", output, messages=_talk(body["conversations"], where))
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


def _talk(turns: list[Any], where: str) -> list[dict[str, str]]:
    """Return a ShareGPT conversation as messages, up to the last user message, which the model then
    answers.
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
