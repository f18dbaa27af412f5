"""Reads the lines of one or several files as one input, each as a text or as a JSON value.

A line of a JSONL file is text in quotes, or an object whose text is in one field. A line of any
other file is a text itself, without the spaces around it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcli.api.bodies.base import json_type
from llmcli.batch.input_lines import BatchInput, InputLine, LineSurvey, open_input
from llmcli.batch.request_line import DamagedLine, line_name, read_line, read_line_text
from llmcli.errors import UsageError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
FORMATS = ("auto", "jsonl", "text")
MAX_NAMED_FIELDS = 5


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of an input file. `line`: its index counts the lines of all files, its number those of
    its own file. `file`: name of the file, or "" if there is only one. `is_json`: whether it is
    read as JSON.
    """

    line: InputLine
    file: str
    is_json: bool

    @property
    def index(self) -> int:
        """The line's position among the lines of all files that are not blank, from 0."""
        return self.line.index

    @property
    def location(self) -> str:
        """Where the line is, for messages."""
        return f"{self.file} line {self.line.number}" if self.file else f"line {self.line.number}"

    def name(self, value: Any = None) -> str:
        """The line's name in the output: the `custom_id` of its JSON `value`, or its place."""
        custom_id = value.get("custom_id") if isinstance(value, dict) else None
        if isinstance(custom_id, str):
            return custom_id
        return f"{self.file}:{line_name(self.line)}" if self.file else line_name(self.line)

    def read_name(self) -> str:
        """Return the line's name. The line may be damaged."""
        try:
            return self.name(self.read())
        except DamagedLine:
            return self.name()

    def read(self) -> Any:
        """Return the JSON value or the text of the line. Raises DamagedLine."""
        return read_line(self.line) if self.is_json else read_line_text(self.line)


class TextFiles:
    """The lines of several inputs, one after another. They can be read several times."""

    def __init__(self, inputs: Sequence[BatchInput], are_json: Sequence[bool]) -> None:
        self._inputs, self._are_json = inputs, are_json

    def survey(self) -> LineSurvey:
        """Return the sum of the surveys of all inputs. Its hash is that of the one input, or of the
        hashes of several. Raises UserError for damaged files.
        """
        surveys = [source.survey() for source in self._inputs]
        hashes = [survey.sha256 for survey in surveys]
        return LineSurvey(
            sum(survey.count for survey in surveys),
            hashes[0]
            if len(hashes) == 1
            else hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
            next((survey.unended for survey in surveys if survey.unended), 0),
            sum(survey.blank for survey in surveys),
        )

    def lines(self) -> Iterator[SourceLine]:
        """Yield the lines that are not blank."""
        index, has_several = 0, len(self._inputs) > 1
        for source, is_json in zip(self._inputs, self._are_json, strict=True):
            for line in source.lines():
                yield SourceLine(
                    replace(line, index=index), source.name if has_several else "", is_json
                )
                index += 1


@contextmanager
def open_text_files(
    names: Sequence[str], text_format: str, copy_folder: Path
) -> Iterator[TextFiles]:
    """Open the files `names` (`-`: standard input) and yield them as one input. `text_format`: one
    of FORMATS; "auto" reads files as JSONL by the ends of their names. `copy_folder`: for a
    temporary copy of what can be read only once.

    Raises UserError if a file cannot be read, and UsageError if "auto" does not find its format.
    """
    if names.count("-") > 1:
        raise UsageError("- (stdin) is given twice", hint="give it once")
    with ExitStack() as stack:
        inputs = [stack.enter_context(open_input(name, copy_folder)) for name in names]
        yield TextFiles(
            inputs,
            [
                _is_json(name, text_format, source)
                for name, source in zip(names, inputs, strict=True)
            ],
        )


def _is_json(name: str, text_format: str, source: BatchInput) -> bool:
    """Return whether the lines of a file are JSON. Raises UsageError for a file that is not called
    JSONL and begins with an object or a text in quotes, which may be either.
    """
    if text_format != "auto":
        return text_format == "jsonl"
    if name.lower().removesuffix(".gz").endswith(JSON_SUFFIXES):
        return True
    first = next(source.lines(), None)
    if first is not None and first.raw[:1] in (b"{", b'"'):
        try:
            read_line(first)
        except DamagedLine:
            return False
        raise UsageError(
            f"{source.name} looks like JSONL, but its name does not end with .jsonl",
            hint="add --format jsonl, or --format text to read each line as a text",
        )
    return False


def read_text(line: SourceLine, field: str, other_fields: set[str]) -> tuple[str, str]:
    """Return the name and the text of a line. `field`: the field of a JSON object that has the
    text; names of further fields are added to `other_fields`.

    Raises DamagedLine if the line has no text.
    """
    value = line.read()
    if isinstance(value, str):
        return line.name(), value
    if not isinstance(value, dict):
        raise DamagedLine(
            f"line {line.line.number}: it must be text or an object with {field}, "
            f"not {json_type(value)}"
        )
    text = value.get(field)
    if not isinstance(text, str):
        problem = f"is {json_type(text)}, not text" if field in value else "is missing"
        raise DamagedLine(f"line {line.line.number}: {field} {problem}")
    if len(other_fields) < MAX_NAMED_FIELDS:
        other_fields |= value.keys() - {field, "custom_id"}
    return line.name(value), text
