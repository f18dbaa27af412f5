"""Arguments between tags, converted to JSON while they arrive.

A value is a string if the function's schema says so, or as soon as its beginning cannot be JSON:
such a value is streamed in pieces. A value that may be JSON (a number, or one that begins with a
bracket or a quotation mark) is converted once it is complete.
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
# what an unfinished tag at the end of an answer may look like
PARTIAL_TAG_PATTERN = re.compile(r"\s*(<[^>]*|<\S*\s*(<\S*)?)?")


@dataclass(frozen=True)
class TagArguments(ArgumentFormat):
    """How a call is written. The two call patterns match the head of the first and of a later call
    of a block (group: name). `argument_pattern` matches the opening of an argument (groups: key;
    text if the tag says that the value is a string), `call_end_pattern` the end of the call.
    `value_closing` is the tag after a value; `value_stops` are tags that also end it, with any
    white space between them. `padding`: characters that are removed around a value, only one on
    each side if `pads_once`.
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
        """Return a stream for one call's arguments."""
        return TagArgumentStream(self, string_arguments)

    @cached_property
    def between_values(self) -> re.Pattern[str]:
        """Matches what comes between two values: an argument's opening, or the call's end."""
        return re.compile(f"{self.argument_pattern}|(?P<ends>{self.call_end_pattern})", re.DOTALL)

    @cached_property
    def value_end(self) -> re.Pattern[str]:
        """Matches the end of a value."""
        stops = "".join(f"|(?={re.escape(word)})" for word in self.value_stops).replace(
            "><", r">\s*<"
        )
        return re.compile(re.escape(self.value_closing) + stops)

    def certain_length(self, text: str) -> int:
        """Return the length of the part of a value's text that cannot be the beginning of its
        end.
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
    """Converts one call's tagged arguments to JSON; `string_arguments` are those that are strings
    by its schema.
    """

    def __init__(self, argument_format: TagArguments, string_arguments: frozenset[str]) -> None:
        self.is_complete = False
        self._form, self._texts, self._separator = argument_format, string_arguments, "{"
        self._value: _Value | None = None

    def feed(self, text: str, is_last: bool) -> tuple[str, int]:
        """Return the JSON of a piece of text and the number of characters it has read."""
        out, position, progressed = list[str](), 0, True
        if self._separator == "{":
            out, self._separator = ["{"], ""
        while progressed and not self.is_complete:
            step = self._in_value if self._value else self._between_values
            piece, used, progressed = step(text[position:], is_last)
            out.append(piece)
            position += used
        return "".join(out), position

    def _between_values(self, text: str, over: bool) -> tuple[str, int, bool]:
        match = self._form.between_values.search(text)
        if match is None:
            return "", len(text) if over and PARTIAL_TAG_PATTERN.fullmatch(text) else 0, False
        if match["ends"] is not None:
            self.is_complete = True
            return "}", match.end(), False
        key = match["key"].strip()
        self._value = _Value(self._form, key in self._texts or bool(match.groupdict().get("text")))
        before, self._separator = self._separator, ", "
        return f"{before}{json.dumps(key, ensure_ascii=False)}: ", match.end(), True

    def _in_value(self, text: str, over: bool) -> tuple[str, int, bool]:
        value, match = self._value, self._form.value_end.search(text)
        assert value
        if match:
            self._value = None
            return value.end(text[: match.start()]), match.end(), True
        used = self._form.certain_length(text)
        piece = value.feed(text[:used])
        return (piece + value.cut(), len(text), False) if over else (piece, used, False)


class _Value:
    """One argument's value. `text`: it is a string. feed() receives only text that certainly
    belongs to it.
    """

    def __init__(self, form: TagArguments, text: bool) -> None:
        self._form, self._text, self._has_quote, self._has_text, self._may_be_json = (
            form,
            text,
            False,
            False,
            False,
        )
        self._pending = list[str]()

    def feed(self, words: str) -> str:
        """Return the JSON of a piece of the value."""
        form = self._form
        if not self._has_text:
            words = (
                words.removeprefix(form.padding) if form.pads_once else words.lstrip(form.padding)
            )
            self._has_text = bool(words)
        self._pending.append(words)
        if self._may_be_json or not (self._text or self._is_plain()):
            return ""
        words, self._text = "".join(self._pending), True
        body = self._strip(words)
        self._pending = [words[len(body) :]]
        before, self._has_quote = "" if self._has_quote else '"', True
        return before + json.dumps(body, ensure_ascii=False)[1:-1]

    def end(self, words: str) -> str:
        """Return the JSON of the last piece and the end of the value."""
        piece = self.feed(words)
        if self._has_quote:
            return piece + '"'
        return json.dumps(_value(self._strip("".join(self._pending))), ensure_ascii=False)

    def cut(self) -> str:
        """Return the rest of the value when the answer ends inside it."""
        return "" if self._has_quote else self._strip("".join(self._pending))

    def _is_plain(self) -> bool:
        """Return whether the held text cannot be the beginning of JSON."""
        text = "".join(self._pending).lstrip()
        self._may_be_json = text.startswith(JSON_OPENINGS)
        is_word = any(word.startswith(text) or word == text.rstrip() for word in JSON_WORDS)
        return not (self._may_be_json or is_word or NUMBER_PATTERN.fullmatch(text))

    def _strip(self, words: str) -> str:
        form = self._form
        return words.removesuffix(form.padding) if form.pads_once else words.rstrip(form.padding)


def _value(words: str) -> Any:
    try:
        return parse_strict_json(words)
    except (ValueError, RecursionError):
        return words
