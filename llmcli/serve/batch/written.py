"""A line of OUT: OpenAI's batch output, the same bytes whenever and in whatever order it was made.

2026-11: `created` is 0, and there are no timings and no counts of cached tokens; ids are hashes of
the batch and the line. So the file of a killed run equals that of an unbroken one, and an id tells
which batch a line belongs to.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from llmcli.serve.problems import Problem, document
from llmcli.serve.schema.base import Document, encoded

MOMENTS = ("created", "created_at", "completed_at")  # seconds since 1970
LEFT_OUT = (
    "timings",
    "prompt_tokens_details",
    "input_tokens_details",
)  # what was cached, and how long it took
IDS = ("id", "call_id", "item_id")
# in a line that has an answer; JSON escapes quotes within texts
ANSWERED = b',"response":{"status_code":200,'
HEX = re.compile(r"[0-9a-f]{8,}$")


def line_id(batch: str, index: int) -> str:
    """The `id` of a line of the batch of that fingerprint."""
    return f"batch_req_{_hex(batch, index)}"


def answered(batch: str, index: int, custom_id: str, body: Document) -> bytes:
    """A line with an answer."""
    return _line(batch, index, custom_id, 200, _Settled(batch, index).document(body))


def refused(batch: str, index: int, custom_id: str, error: Problem) -> bytes:
    """A line that asks for something that cannot be done, with what the server would have answered."""
    return _line(batch, index, custom_id, error.status, document(error))


def damaged(batch: str, index: int, custom_id: str, number: int, code: str, message: str) -> bytes:
    """A line that could not be read."""
    about = {"code": code, "message": message, "line": number}
    return encoded(
        {"id": line_id(batch, index), "custom_id": custom_id, "response": None, "error": about}
    )


def _line(batch: str, index: int, custom_id: str, status: int, body: Mapping[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": f"req_{_hex(batch, index)}", "body": body}
    return encoded(
        {"id": line_id(batch, index), "custom_id": custom_id, "response": response, "error": None}
    )


def _hex(*words: object) -> str:
    return hashlib.sha256(":".join(map(str, words)).encode()).hexdigest()[:24]


class _Settled:
    """A document without what differs from run to run; its ids are counted."""

    def __init__(self, *seed: object) -> None:
        self._seed = seed
        self._ids: dict[str, str] = {}

    def document(self, value: Any) -> Any:
        """A copy."""
        if isinstance(value, list):
            return [self.document(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        return {key: self._value(key, inner) for key, inner in value.items() if key not in LEFT_OUT}

    def _value(self, key: str, value: Any) -> Any:
        if key in MOMENTS and isinstance(value, int | float):
            return 0
        if key in IDS and isinstance(value, str) and HEX.search(value):
            made = HEX.sub(_hex(*self._seed, len(self._ids)), value)
            return self._ids.setdefault(value, made)
        return self.document(value)
