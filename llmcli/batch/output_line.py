"""Formats output lines in OpenAI's batch format, so that a line has the same bytes in every run.

`created` is 0, timings and counts of cached tokens are left out, and ids are hashes of the batch's
id and the line's index. Therefore an interrupted and resumed run writes the same file as an
uninterrupted run, and the ids in a file show which batch has written it.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import ApiError, error_document
from llmcli.api.forms.base import Document, encode_json

TIME_FIELDS = ("created", "created_at", "completed_at")  # fields with a Unix time in seconds
# Fields about durations and the cache. They are left out, because they differ from run to run.
VOLATILE_FIELDS = ("timings", "prompt_tokens_details")
CACHE_FIELD = "input_tokens_details"  # clients require it; its counts of cached tokens become 0
ID_FIELDS = ("id", "call_id", "item_id")
# Only lines with an answer contain these bytes. The text of an answer cannot contain them, because
# JSON escapes its quotes.
ANSWERED_MARK = b',"response":{"status_code":200,'
# Line ends of Unicode, which JSON allows in texts. Many programs would split a line there.
LINE_ENDS = (("\x85", rb"\u0085"), ("\u2028", rb"\u2028"), ("\u2029", rb"\u2029"))
HEX_ENDING_PATTERN = re.compile(r"[0-9a-f]{8,}$")


def line_id(batch: str, index: int) -> str:
    """Return the `id` field of an output line. `batch`: id of the batch; `index`: index of the
    input line.
    """
    return f"batch_req_{_hex_digits(batch, index)}"


def answered_line(batch: str, index: int, custom_id: str, body: Document) -> bytes:
    """Return the output line, without newline, for a request that was answered. `body`: the answer
    as the server would send it; fields that differ from run to run are replaced or left out.
    """
    return _line(batch, index, custom_id, 200, _StableCopy(batch, index).document(body))


def error_line(batch: str, index: int, custom_id: str, error: ApiError) -> bytes:
    """Return the output line for a request that failed. Its response has the status and the error
    body that the server would send.
    """
    return _line(batch, index, custom_id, error.status, error_document(error))


def damaged_line(
    batch: str, index: int, custom_id: str, number: int, code: str, message: str
) -> bytes:
    """Return the output line for an input line that is not a JSON request at all. `number`: line
    number in the input, from 1. `code`: OpenAI's name for the error.
    """
    about = {"code": code, "message": message, "line": number}
    return encode_line(
        {"id": line_id(batch, index), "custom_id": custom_id, "response": None, "error": about}
    )


def encode_line(document: Mapping[str, Any]) -> bytes:
    """Return an output line, without newline, as one line for every program."""
    raw = encode_json(document)
    for character, escape in LINE_ENDS:
        raw = raw.replace(character.encode(), escape)
    return raw


def _line(batch: str, index: int, custom_id: str, status: int, body: Mapping[str, Any]) -> bytes:
    response = {
        "status_code": status,
        "request_id": f"req_{_hex_digits(batch, index)}",
        "body": body,
    }
    return encode_line(
        {"id": line_id(batch, index), "custom_id": custom_id, "response": response, "error": None}
    )


def _hex_digits(*words: object) -> str:
    """Return 24 hex digits of the SHA-256 of the words."""
    return hashlib.sha256(":".join(map(str, words)).encode()).hexdigest()[:24]


class _StableCopy:
    """Copies a JSON document without the values that differ from run to run. The random digits of
    each id are replaced by a hash of `seed` (batch id and line index) and a counter. An id that
    occurs several times gets the same replacement everywhere.
    """

    def __init__(self, *seed: object) -> None:
        self._seed = seed
        self._ids: dict[str, str] = {}

    def document(self, value: Any) -> Any:
        """Return a cleaned copy of a JSON value, whose objects and lists are copied recursively."""
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
        """Return the cleaned copy of the value of a JSON field."""
        if key == CACHE_FIELD and isinstance(value, dict):
            return dict.fromkeys(value, 0)
        if key in TIME_FIELDS and isinstance(value, int | float):
            return 0
        if key in ID_FIELDS and isinstance(value, str) and HEX_ENDING_PATTERN.search(value):
            replacement = HEX_ENDING_PATTERN.sub(_hex_digits(*self._seed, len(self._ids)), value)
            return self._ids.setdefault(value, replacement)
        return self.document(value)
