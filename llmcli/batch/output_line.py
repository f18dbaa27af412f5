"""Output lines in OpenAI's batch format. A line has the same bytes in every run, in whatever order
lines are written.

`created` is 0, timings and counts of cached tokens are left out, and ids are hashes of the batch
and the line. So the file of an interrupted and resumed run equals that of an uninterrupted one, and
an id identifies its batch.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import ApiError, error_document
from llmcli.api.forms.base import Document, encode_json

TIME_FIELDS = ("created", "created_at", "completed_at")  # fields with a Unix time in seconds
# Fields about the cache and about durations, which differ from run to run.
VOLATILE_FIELDS = ("timings", "prompt_tokens_details", "input_tokens_details")
ID_FIELDS = ("id", "call_id", "item_id")
# Every line with an answer contains this. Texts cannot contain it, because JSON escapes their
# quotes.
ANSWERED_MARK = b',"response":{"status_code":200,'
HEX_ENDING_PATTERN = re.compile(r"[0-9a-f]{8,}$")


def line_id(batch: str, index: int) -> str:
    """Return the `id` of an output line. `batch`: the id of the batch; `index`: the index of the
    line.
    """
    return f"batch_req_{_hex_digits(batch, index)}"


def answered_line(batch: str, index: int, custom_id: str, body: Document) -> bytes:
    """Return the output line for a request that was answered."""
    return _line(batch, index, custom_id, 200, _StableCopy(batch, index).document(body))


def error_line(batch: str, index: int, custom_id: str, error: ApiError) -> bytes:
    """Return the output line for a request that failed, with the error that the server would send."""
    return _line(batch, index, custom_id, error.status, error_document(error))


def damaged_line(
    batch: str, index: int, custom_id: str, number: int, code: str, message: str
) -> bytes:
    """Return the output line for an input line that cannot be read."""
    about = {"code": code, "message": message, "line": number}
    return encode_json(
        {"id": line_id(batch, index), "custom_id": custom_id, "response": None, "error": about}
    )


def _line(batch: str, index: int, custom_id: str, status: int, body: Mapping[str, Any]) -> bytes:
    response = {
        "status_code": status,
        "request_id": f"req_{_hex_digits(batch, index)}",
        "body": body,
    }
    return encode_json(
        {"id": line_id(batch, index), "custom_id": custom_id, "response": response, "error": None}
    )


def _hex_digits(*words: object) -> str:
    return hashlib.sha256(":".join(map(str, words)).encode()).hexdigest()[:24]


class _StableCopy:
    """Copies documents without the values that differ from run to run. Ids are replaced by hashes
    of the batch, the line and a counter.
    """

    def __init__(self, *seed: object) -> None:
        self._seed = seed
        self._ids: dict[str, str] = {}

    def document(self, value: Any) -> Any:
        """Return a copy of a JSON value."""
        if isinstance(value, list):
            return [self.document(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        return {
            key: self._value(key, inner)
            for key, inner in value.items()
            if key not in VOLATILE_FIELDS
        }

    def _value(self, key: str, value: Any) -> Any:
        if key in TIME_FIELDS and isinstance(value, int | float):
            return 0
        if key in ID_FIELDS and isinstance(value, str) and HEX_ENDING_PATTERN.search(value):
            replacement = HEX_ENDING_PATTERN.sub(_hex_digits(*self._seed, len(self._ids)), value)
            return self._ids.setdefault(value, replacement)
        return self.document(value)
