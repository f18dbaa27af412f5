"""Converts arguments between tags, such as `<parameter=key>value</parameter>`, to JSON while they
arrive.

A value is a string if the function's schema says so, or if it begins like no JSON value; a string
is converted in pieces. A value that may be JSON (a number, or a text that begins with a bracket or
a quotation mark) is converted when it is complete.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmcli.api.tool_calls.base import ArgumentFormat
from llmcli.strict_json import parse_strict_json

JSON_WORDS = "true", "false", "null"
JSON_OPENINGS = "{", "[", '"'
NUMBER_PATTERN = re.compile(r"[-+.\deE]*\s*")
TAG_SPACE_PATTERN = re.compile(r">\s+(?=<|$)")
# an incomplete tag at the end of an answer
PARTIAL_TAG_PATTERN = re.compile(r"\s*(<[^>]*|<\S*\s*(<\S*)?)?")


@dataclass(frozen=True)
class TagArguments(ArgumentFormat):
    """The tags around arguments, as patterns and texts.

    - `first_call_pattern`, `next_call_pattern`: match the beginning of the first call of a block,
      and of a later call. Group: `name`.
    - `argument_pattern`: matches the opening tag of an argument. Groups: `key`; `text`, if the tag
      tells that the value is a string.
    - `call_end_pattern`: matches the end of the call.
    - `value_closing`: the tag after a value.
    - `value_stops`: texts that also end a value, if the model forgot `value_closing`. White space
      may be between two tags of such a text.
    - `padding`: characters to remove around a value; with `pads_once`, one on each side at most.
    """

    first_call_pattern: str
    argument_pattern: str
    value_closing: str
    call_end_pattern: str
    padding: str
    pads_once: bool = False
    next_call_pattern: str = ""
    value_stops: tuple[str, ...] = ()

    def open_stream(self, string_arguments: frozenset[str]) -> "TagArgumentStream":
        """Return a converter for one call's arguments."""
        return TagArgumentStream(self, string_arguments)

    @cached_property
    def between_values(self) -> re.Pattern[str]:
        """The pattern for the text after a value: the opening tag of the next argument, or (group
        `ends`) the end of the call.
        """
        return re.compile(f"{self.argument_pattern}|(?P<ends>{self.call_end_pattern})", re.DOTALL)

    @cached_property
    def value_end(self) -> re.Pattern[str]:
        """The pattern for the end of a value."""
        stops = "".join(f"|(?={re.escape(word)})" for word in self.value_stops).replace(
            "><", r">\s*<"
        )
        return re.compile(re.escape(self.value_closing) + stops)

    def certain_length(self, text: str) -> int:
        """Return the number of characters of `text` that certainly belong to the value. The
        characters after them may be the beginning of the tag that ends it.
        """
        last = text.rfind("<")
        for index in (text.rfind("<", 0, max(last, 0)), last):
            tail = TAG_SPACE_PATTERN.sub(">", text[index:])
            if index >= 0 and any(
                word.startswith(tail) for word in (self.value_closing, *self.value_stops)
            ):
                return index
        return len(text)


class TagArgumentStream:
    """Converts the arguments of one call to JSON. `string_arguments`: the names of the arguments
    that the function's schema declares as strings.
    """

    def __init__(self, argument_format: TagArguments, string_arguments: frozenset[str]) -> None:
        self.is_complete = False
        self._format, self._string_arguments, self._separator = (
            argument_format,
            string_arguments,
            "{",
        )
        self._value: _Value | None = None

    def feed(self, text: str, is_last: bool) -> tuple[str, int]:
        """Return the JSON for a piece of text, and the number of characters that were read from
        it.
        """
        out, position, progressed = list[str](), 0, True
        if self._separator == "{":
            out, self._separator = ["{"], ""
        while progressed and not self.is_complete:
            step = self._in_value if self._value else self._between_values
            piece, n_read, progressed = step(text[position:], is_last)
            out.append(piece)
            position += n_read
        return "".join(out), position

    def _between_values(self, text: str, is_last: bool) -> tuple[str, int, bool]:
        """Read the text between two values. Return its JSON, the number of characters read, and
        whether a value follows.
        """
        match = self._format.between_values.search(text)
        if match is None:
            return "", len(text) if is_last and PARTIAL_TAG_PATTERN.fullmatch(text) else 0, False
        if match["ends"] is not None:
            self.is_complete = True
            return "}", match.end(), False
        key = match["key"].strip()
        self._value = _Value(
            self._format, key in self._string_arguments or bool(match.groupdict().get("text"))
        )
        separator, self._separator = self._separator, ", "
        return f"{separator}{json.dumps(key, ensure_ascii=False)}: ", match.end(), True

    def _in_value(self, text: str, is_last: bool) -> tuple[str, int, bool]:
        """Read the text of a value. Return its JSON, the number of characters read, and whether the
        value has ended.
        """
        value, match = self._value, self._format.value_end.search(text)
        assert value
        if match:
            self._value = None
            return value.end(text[: match.start()]), match.end(), True
        n_read = self._format.certain_length(text)
        piece = value.feed(text[:n_read])
        return (piece + value.cut(), len(text), False) if is_last else (piece, n_read, False)


class _Value:
    """Converts the value of one argument to JSON. `is_string`: whether the value is known to be a
    string. feed() must only receive text that certainly belongs to the value.
    """

    def __init__(self, argument_format: TagArguments, is_string: bool) -> None:
        self._format, self._is_string, self._has_quote, self._has_text, self._may_be_json = (
            argument_format,
            is_string,
            False,
            False,
            False,
        )
        self._pending = list[str]()

    def feed(self, text: str) -> str:
        """Return the JSON for a piece of the value. While it is unknown whether the value is a
        string, the piece is stored and "" is returned.
        """
        argument_format = self._format
        if not self._has_text:
            text = (
                text.removeprefix(argument_format.padding)
                if argument_format.pads_once
                else text.lstrip(argument_format.padding)
            )
            self._has_text = bool(text)
        self._pending.append(text)
        if self._may_be_json or not (self._is_string or self._is_plain()):
            return ""
        pending, self._is_string = "".join(self._pending), True
        body = self._strip(pending)
        self._pending = [pending[len(body) :]]
        quote, self._has_quote = "" if self._has_quote else '"', True
        return quote + json.dumps(body, ensure_ascii=False)[1:-1]

    def end(self, text: str) -> str:
        """Return the JSON for the last piece, and for the stored text."""
        piece = self.feed(text)
        if self._has_quote:
            return piece + '"'
        return json.dumps(_value(self._strip("".join(self._pending))), ensure_ascii=False)

    def cut(self) -> str:
        """Return the stored text if the answer ends inside the value; it is not converted."""
        return "" if self._has_quote else self._strip("".join(self._pending))

    def _is_plain(self) -> bool:
        """Return whether the stored text cannot be the beginning of a JSON value, so that the value
        is a string.
        """
        text = "".join(self._pending).lstrip()
        self._may_be_json = text.startswith(JSON_OPENINGS)
        is_word = any(word.startswith(text) or word == text.rstrip() for word in JSON_WORDS)
        return not (self._may_be_json or is_word or NUMBER_PATTERN.fullmatch(text))

    def _strip(self, text: str) -> str:
        argument_format = self._format
        return (
            text.removesuffix(argument_format.padding)
            if argument_format.pads_once
            else text.rstrip(argument_format.padding)
        )


def _value(text: str) -> Any:
    """Return the parsed value of a JSON text, or the text itself if it is not JSON."""
    try:
        return parse_strict_json(text)
    except (ValueError, RecursionError):
        return text
