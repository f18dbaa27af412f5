"""Requests from a file: OpenAI's batch lines, ShareGPT's conversations, lines with a prompt or
messages, bare prompts.

The file is input like any other: what is none of these is told with its line.
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
HINT = 'a line: {"prompt": "…"}, {"messages": […]}, {"conversations": […]}, or one of OpenAI\'s batch format'


def read(path: Path, shape: Shape) -> list[Job]:
    """The jobs of a file, in its order; `shape.output` is asked where a line says no length. Raises
    UserError.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(
                f"{path} is larger than {MOST_BYTES >> 30} GiB",
                hint="take fewer lines: head -n 10000",
            )
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"cannot read {path}: {why}", hint="--mix takes fixed, sonnet or a JSONL file"
        ) from None
    found = [_job(row, shape, f"{path}:{number}") for number, row in _rows(text, path)]
    if not found:
        raise UserError(f"{path} holds no request", hint=HINT)
    return found


def replayed(found: Sequence[Job], shape: Shape, seed: int) -> Iterator[Job]:
    """The jobs in random order without end: each once, then all again."""
    rng = random.Random(f"{seed} file")
    while True:
        for job in rng.sample(found, len(found)):
            yield replace(job, cancel_after=mixes.leaves(shape, job.max_tokens, rng))


def _rows(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    whole = text.lstrip().startswith("[")  # ShareGPT is published as one array
    pieces = (
        [(1, text)] if whole else list(enumerate(text.split("\n"), 1))
    )  # splitlines() cuts at U+2028 within a text
    for number, piece in pieces:
        if not piece.strip():
            continue
        try:
            row = json.loads(piece)
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number} is no JSON", hint=HINT) from None
        yield from enumerate(row, 1) if whole and isinstance(row, list) else [(number, row)]


def _job(row: Any, shape: Shape, where: str) -> Job:
    if isinstance(row, str):  # as `batch` takes them
        return Job(row, shape.output)
    told = row.get("body", row) if isinstance(row, dict) else None
    if not isinstance(told, dict):
        raise UserError(f"{where} is no request", hint=HINT)
    length = told.get("max_completion_tokens", told.get("max_tokens", told.get("output_tokens")))
    output = length if type(length) is int and length > 0 else shape.output
    if isinstance(told.get("prompt"), str):
        return Job(told["prompt"], output)
    if isinstance(told.get("conversations"), list):
        return Job("", output, messages=_talk(told["conversations"], where))
    if isinstance(told.get("turns"), list) and told["turns"]:
        return Job(str(told["turns"][0]), output)
    messages = told.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return Job("", output, messages=messages)
    raise UserError(f"{where} is no request", hint=HINT)


def _talk(turns: list[Any], where: str) -> list[dict[str, str]]:
    """A conversation up to the last thing that a person said: what came after it is for the model
    to write.
    """
    found = []
    for turn in turns:
        role = ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise UserError(
                f"{where} holds a turn that is none", hint='{"from": "human", "value": "…"}'
            )
        found.append({"role": role, "content": turn["value"]})
    while found and found[-1]["role"] != "user":
        found.pop()
    if not found:
        raise UserError(f"{where}: nobody asks anything", hint=HINT)
    return found
