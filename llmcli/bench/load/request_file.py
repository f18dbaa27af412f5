"""Requests from a file: OpenAI batch lines, ShareGPT conversations, lines with a prompt or
messages, or plain prompts.

The file is untrusted input: an invalid line is reported with its number.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.bench.load import mixes
from llmcli.bench.load.mixes import Shape
from llmcli.bench.load.records import Job
from llmcli.errors import UserError

MOST_BYTES = 1 << 30
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
HINT = (
    'each line is {"prompt": "…"}, {"messages": […]}, {"conversations": […]}, '
    "or a line of OpenAI's batch format"
)


def read(path: Path, shape: Shape) -> list[Job]:
    """Return the requests of a file in order. `shape.output_tokens` applies to lines without a
    length. Raises UserError.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(
                f"{path} is larger than {MOST_BYTES >> 30} GiB",
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
        raise UserError(f"{path} contains no request", hint=HINT)
    return jobs


def replayed(found: Sequence[Job], shape: Shape, seed: int) -> Iterator[Job]:
    """Yield the jobs in random order endlessly: every job once, then all again."""
    rng = random.Random(f"{seed} file")
    while True:
        for job in rng.sample(found, len(found)):
            yield replace(job, cancel_after=mixes.leaves(shape, job.max_tokens, rng))


def _rows(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    is_array = text.lstrip().startswith("[")  # ShareGPT is published as one array
    # str.splitlines() would also split at U+2028 inside a text
    pieces = [(1, text)] if is_array else list(enumerate(text.split("\n"), 1))
    for number, piece in pieces:
        if not piece.strip():
            continue
        try:
            row = json.loads(piece)
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number} is not valid JSON", hint=HINT) from None
        yield from enumerate(row, 1) if is_array and isinstance(row, list) else [(number, row)]


def _job(row: Any, shape: Shape, where: str) -> Job:
    if isinstance(row, str):  # as accepted by `batch`
        return Job(row, shape.output)
    body = row.get("body", row) if isinstance(row, dict) else None
    if not isinstance(body, dict):
        raise UserError(f"{where} is not a request", hint=HINT)
    length = body.get("max_completion_tokens", body.get("max_tokens", body.get("output_tokens")))
    output = length if type(length) is int and length > 0 else shape.output
    if isinstance(body.get("prompt"), str):
        return Job(body["prompt"], output)
    if isinstance(body.get("conversations"), list):
        return Job("", output, messages=_talk(body["conversations"], where))
    if isinstance(body.get("turns"), list) and body["turns"]:
        return Job(str(body["turns"][0]), output)
    messages = body.get("messages")
    if (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) for message in messages)
    ):
        return Job("", output, messages=messages)
    raise UserError(f"{where} is not a request", hint=HINT)


def _talk(turns: list[Any], where: str) -> list[dict[str, str]]:
    """Return a conversation up to the last user message; the model writes what follows."""
    messages = []
    for turn in turns:
        role = ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise UserError(
                f"{where} contains an invalid turn", hint='{"from": "human", "value": "…"}'
            )
        messages.append({"role": role, "content": turn["value"]})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise UserError(f"{where} contains no user message", hint=HINT)
    return messages
