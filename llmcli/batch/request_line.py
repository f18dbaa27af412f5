"""Parses one input line: OpenAI's batch form or a plain prompt, distinguished line by line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.api.errors import Problem
from llmcli.api.fields import Fields, kind
from llmcli.batch.input_lines import MOST, Line
from llmcli.errors import UserError
from llmcli.strict_json import strict
from llmcli.text_input import decoded

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HINT = (
    'a line is {"custom_id", "url", "body"}, {"messages": [...]}, {"prompt": "..."} or "a prompt"'
)


class Damaged(UserError):
    """A line that cannot be read. `code` is OpenAI's name for the error."""

    code = "invalid_json_line"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and its name; `url` is the endpoint that answers it."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def asked(line: Line, *, templated: bool) -> Asked:
    """Return the request of a line. A plain prompt becomes a user's message if `has_template`, else
    a text to continue.

    Raises DamagedLine if the line is not JSON, ApiError if it is not a request.
    """
    value = _parse_json(line)
    name = name_of(line, value)
    if isinstance(value, str):
        return _prompt_request(name, {"prompt": value}, templated)
    if not isinstance(value, dict):
        raise Problem(f"line {line.number} must be an object or text, not {kind(value)}; {HINT}")
    if "body" in value or "url" in value:
        return _read_batch_line(name, Fields(value))
    body = {key: field for key, field in value.items() if key != "custom_id"}
    if "messages" in value:
        return Asked(name, CHAT, body)
    if "prompt" in value:
        return _prompt_request(name, body, templated)
    raise Problem(f"line {line.number} has no request; {HINT}")


def name_of(line: Line, value: Any = None) -> str:
    """Return the name of a line: its custom_id, else its number."""
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else f"line-{line.number}"


def named(line: Line) -> str:
    """Return the name of a line that may be damaged."""
    try:
        return name_of(line, _parse_json(line))
    except UserError:
        return name_of(line)


def twins(lines: Iterable[Line]) -> list[tuple[str, int, int]]:
    """Return each name that occurs again, with the numbers of its first line and of the other
    one.
    """
    # By the hash of a name: the names of millions of lines would take too much memory.
    first: dict[int, int] = {}
    duplicates = []
    for line in lines:
        name = named(line)
        first_number = first.setdefault(hash(name), line.number)
        if first_number != line.number:
            duplicates.append((name, first_number, line.number))
    return duplicates


def _parse_json(line: Line) -> Any:
    if line.too_long:
        raise Damaged(f"line {line.number} has {line.too_long:,} bytes; the limit is {MOST:,}")
    try:
        text = decoded(line.raw, f"line {line.number}")
        return strict(text)
    except RecursionError:
        raise Damaged(f"line {line.number} is nested too deeply") from None
    except UserError as error:
        raise Damaged(str(error)) from None
    except ValueError as error:
        raise Damaged(f"line {line.number} is not JSON: {error}") from None


def _read_batch_line(name: str, fields: Fields) -> Asked:
    method = fields.text("method", "POST")
    if method != "POST":
        raise fields.wrong("method", "POST")
    body = fields.table("body")
    if body is None:
        raise Problem("body is missing", param="body")
    return Asked(name, fields.needed("url"), body.values)


def _prompt_request(name: str, body: dict[str, Any], templated: bool) -> Asked:
    if templated and isinstance(body["prompt"], str):
        others = {key: value for key, value in body.items() if key != "prompt"}
        return Asked(
            name, CHAT, {"messages": [{"role": "user", "content": body["prompt"]}], **others}
        )
    return Asked(name, TEXT, body)
