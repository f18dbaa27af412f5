"""Arguments between tags. They are converted to JSON while they arrive.

A value is a string if the function's schema says so, or if its beginning cannot be JSON; strings
are streamed in pieces. A value that may be JSON (a number, or text that begins with a bracket or a
quotation mark) is converted once it is complete.
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
    """The format of arguments between tags.

    - `first_call_pattern`, `next_call_pattern`: match the beginning of the first call and of a
      later call in a block (group: name).
    - `argument_pattern`: matches the opening of an argument (groups: key; text, if the tag says
      that the value is a string).
    - `call_end_pattern`: matches the end of the call.
    - `value_closing`: the tag after a value.
    - `value_stops`: other tags that also end a value; white space may be between two tags.
    - `padding`: characters that are removed around a value; only one on each side if `pads_once`.
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
        """The pattern that matches the text after a value: the opening of the next argument, or the
        end of the call.
        """
        return re.compile(f"{self.argument_pattern}|(?P<ends>{self.call_end_pattern})", re.DOTALL)

    @cached_property
    def value_end(self) -> re.Pattern[str]:
        """The pattern that matches the end of a value."""
        stops = "".join(f"|(?={re.escape(word)})" for word in self.value_stops).replace(
            "><", r">\s*<"
        )
        return re.compile(re.escape(self.value_closing) + stops)

    def certain_length(self, text: str) -> int:
        """Return the number of characters of `text` that certainly belong to the value. The
        characters after them may be the beginning of the value's end.
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
    """Converts the tags of one call's arguments to JSON. `string_arguments`: the arguments that are
    strings by the function's schema.
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
    """The value of one argument. `text`: whether the value is a string. feed() must only receive
    text that certainly belongs to the value.
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
        """Return the JSON of a piece of the value; empty while the value may still be something
        other than a string.
        """
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
        """Return the JSON of the last piece, and the end of the value."""
        piece = self.feed(words)
        if self._has_quote:
            return piece + '"'
        return json.dumps(_value(self._strip("".join(self._pending))), ensure_ascii=False)

    def cut(self) -> str:
        """Return the JSON of the text that was held back. Call it if the answer ends inside the
        value.
        """
        return "" if self._has_quote else self._strip("".join(self._pending))

    def _is_plain(self) -> bool:
        """Return whether the text so far cannot be the beginning of a JSON value."""
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
