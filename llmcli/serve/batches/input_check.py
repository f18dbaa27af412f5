"""Checks the input file of a batch before its first line is answered, as OpenAI does."""

from collections.abc import Iterable, Iterator
from typing import Any

from llmcli.api.bodies.base import json_type
from llmcli.batch.input_lines import InputLine
from llmcli.batch.request_line import DamagedLine, read_line
from llmcli.errors import UserError
from llmcli.serve.batches.records import BatchProblem

MAX_LINES = 50_000  # OpenAI's limit
MAX_PROBLEMS = 100  # further ones are not reported
LINE_FIELDS = (("custom_id", str), ("method", str), ("url", str), ("body", dict))


def check_input(
    lines: Iterable[InputLine], endpoint: str, max_line_bytes: int
) -> tuple[int, tuple[BatchProblem, ...]]:
    """Return the number of lines of a batch's input, and what is wrong with it. `endpoint`: the path
    of all its requests. `max_line_bytes`: the size of the largest line.
    """
    problems: list[BatchProblem] = []
    n_lines, first_lines = 0, dict[int, int]()
    try:
        for line in lines:
            n_lines += 1
            if n_lines > MAX_LINES:
                text = f"the file has more than {MAX_LINES:,} lines"
                return n_lines, (BatchProblem("too_many_tasks", text),)
            if len(line.raw) > max_line_bytes:
                text = f"line {line.number} has {len(line.raw):,} bytes; the limit is {max_line_bytes:,}"
                problems.append(BatchProblem("line_too_long", text, line.number))
            else:
                problems += _check_line(line, endpoint, first_lines)
            if len(problems) >= MAX_PROBLEMS:
                break
    except UserError as error:  # text in another encoding than UTF-8
        return 0, (BatchProblem("invalid_file", str(error)),)
    if not n_lines:
        problems.append(BatchProblem("empty_file", "the file has no lines"))
    return n_lines, tuple(problems)


def _check_line(
    line: InputLine, endpoint: str, first_lines: dict[int, int]
) -> Iterator[BatchProblem]:
    """Yield what is wrong with a line. `first_lines`: by the hash of a custom_id, the line where it
    first occurs; the line is added.
    """
    try:
        value = read_line(line)
    except DamagedLine as error:
        yield BatchProblem(error.code, str(error), line.number)
        return
    if not isinstance(value, dict):
        text = f"line {line.number} is {json_type(value)}, not an object"
        yield BatchProblem(DamagedLine.code, text, line.number)
        return
    if problem := _field_problem(line.number, value):
        yield problem
        return
    if value["url"] != endpoint:
        text = f"the url {value['url'][:100]!r} is not the endpoint of the batch, {endpoint}"
        yield BatchProblem("url_mismatch", text, line.number, "url")
    # hashes, because the names of many lines would need much memory
    custom_id: str = value["custom_id"]
    first = first_lines.setdefault(hash(custom_id), line.number)
    if first != line.number:
        text = f"the custom_id {custom_id[:100]!r} is also in line {first}"
        yield BatchProblem("duplicate_custom_id", text, line.number, "custom_id")


def _field_problem(number: int, value: dict[str, Any]) -> BatchProblem | None:
    """Return what is wrong with the fields of a line; None if nothing is."""
    for name, kind in LINE_FIELDS:
        field = value.get(name)
        if field is None:
            text = f"{name} is missing"
            return BatchProblem("missing_required_parameter", text, number, name)
        if not isinstance(field, kind):
            expected = json_type(kind())
            text = f"{name} must be {expected}, not {json_type(field)}"
            return BatchProblem("invalid_type", text, number, name)
    if not value["custom_id"]:
        return BatchProblem("invalid_request", "custom_id is empty", number, "custom_id")
    if value["method"] != "POST":
        text = f"method must be POST, not {value['method'][:20]!r}"
        return BatchProblem("invalid_request", text, number, "method")
    return None
