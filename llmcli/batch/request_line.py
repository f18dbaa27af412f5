"""Parses the input lines of a batch. A line is a request in OpenAI's batch format, a bare request
body, or a plain prompt.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from llmcli.api.bodies.base import JsonObject, RequestBody, honored, json_type
from llmcli.api.bodies.checks import read_body
from llmcli.api.errors import ApiError
from llmcli.api.json_pieces import PIECE_CHARACTERS, parse_in_pieces
from llmcli.batch.input_lines import MAX_LINE_BYTES, InputLine
from llmcli.errors import UserError
from llmcli.strict_json import parse_strict_json
from llmcli.text_input import decode_utf8

CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
)
LINE_HINT = (
    'a line is {"custom_id", "url", "body"}, {"messages": [...]}, {"prompt": "..."} or "a prompt"'
)


class DamagedLine(UserError):
    """An input line is not JSON, not UTF-8 or too long. `code` is OpenAI's name for the error."""

    code = "invalid_json_line"


class BatchLine(RequestBody):
    """A line in OpenAI's batch format."""

    origin: ClassVar[str] = "OpenAI"
    reports_unknown: ClassVar[bool] = False
    method: Literal["POST"] | None = honored("POST")
    url: str = honored("the path of the request", ...)
    body: Annotated[dict[str, Any], JsonObject("an object")] = honored("its body", ...)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request of one input line. `custom_id`: the line's name, which the output line repeats.
    `url`: path of the API endpoint, such as /v1/completions; `body`: the JSON body for it.
    """

    custom_id: str
    url: str
    body: Mapping[str, Any]


def parse_line(line: InputLine, *, has_template: bool) -> BatchRequest:
    """Return the request of a line. `has_template`: whether the model has a chat template. If so, a
    plain prompt becomes a user message, otherwise a text to continue.

    Raises DamagedLine if the line is not JSON, and ApiError if the JSON is not a valid request.
    """
    value = read_line(line)
    name = line_name(line, value)
    if isinstance(value, str):
        return _prompt_request(name, {"prompt": value}, has_template)
    if not isinstance(value, dict):
        raise ApiError(
            f"line {line.number} must be an object or text, not {json_type(value)}; {LINE_HINT}"
        )
    if "body" in value or "url" in value:
        fields = read_body(BatchLine, value, [])
        return BatchRequest(name, fields.url, fields.body)
    body = {key: field for key, field in value.items() if key != "custom_id"}
    if "messages" in value:
        return BatchRequest(name, CHAT_PATH, body)
    if "prompt" in value:
        return _prompt_request(name, body, has_template)
    raise ApiError(f"line {line.number} has no request; {LINE_HINT}")


def line_name(line: InputLine, value: Any = None) -> str:
    """Return the name of a line whose parsed JSON is `value`: its custom_id, or `line-NUMBER` if it
    has none.
    """
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else f"line-{line.number}"


def read_line_name(line: InputLine) -> str:
    """Return the name of a line that is not parsed yet. A line that is not JSON is called
    `line-NUMBER`.
    """
    try:
        return line_name(line, read_line(line))
    except UserError:
        return line_name(line)


def duplicate_ids(lines: Iterable[InputLine]) -> list[tuple[str, int, int]]:
    """Return the lines whose name occurs on an earlier line: tuples of the name, the number of the
    first line with this name, and the number of the repeating line.
    """
    # The keys are hashes, because the names of millions of lines would need too much memory.
    first: dict[int, int] = {}
    duplicates = []
    for line in lines:
        name = read_line_name(line)
        first_number = first.setdefault(hash(name), line.number)
        if first_number != line.number:
            duplicates.append((name, first_number, line.number))
    return duplicates


def read_line_text(line: InputLine) -> str:
    """Return the text of a line. Raises DamagedLine if it is too long or not UTF-8."""
    if line.too_long:
        raise DamagedLine(
            f"line {line.number} has {line.too_long:,} bytes; the limit is {MAX_LINE_BYTES:,}"
        )
    try:
        return decode_utf8(line.raw, f"line {line.number}")
    except UserError as error:
        raise DamagedLine(str(error)) from None


def read_line(line: InputLine) -> Any:
    """Return the JSON value of a line. Raises DamagedLine if the line has none."""
    text = read_line_text(line)
    try:
        if len(text) <= PIECE_CHARACTERS:
            return parse_strict_json(text)
        return parse_in_pieces(text.encode())  # lets other threads run meanwhile
    except RecursionError:
        raise DamagedLine(f"line {line.number} is nested too deeply") from None
    except UserError as error:
        raise DamagedLine(str(error)) from None
    except ValueError as error:
        raise DamagedLine(f"line {line.number} is not JSON: {error}") from None


def _prompt_request(name: str, body: dict[str, Any], has_template: bool) -> BatchRequest:
    """Return the request for a body with a `prompt`. A text prompt becomes a user message if the
    model has a chat template.
    """
    if has_template and isinstance(body["prompt"], str):
        other_fields = {key: value for key, value in body.items() if key != "prompt"}
        messages = [{"role": "user", "content": body["prompt"]}]
        return BatchRequest(name, CHAT_PATH, {"messages": messages, **other_fields})
    return BatchRequest(name, COMPLETIONS_PATH, body)
