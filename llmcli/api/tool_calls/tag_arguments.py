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

from llmcli.api.tool_calls.base import Form
from llmcli.strict_json import strict

WORDS = "true", "false", "null"
WHOLE = "{", "[", '"'
NUMBER = re.compile(r"[-+.\deE]*\s*")
APART = re.compile(r">\s+(?=<|$)")
# what an unfinished tag at the end of an answer may look like
CUT = re.compile(r"\s*(<[^>]*|<\S*\s*(<\S*)?)?")


@dataclass(frozen=True)
class Tags(Form):
    """How a call is written. The two call patterns match the head of the first and of a later call
    of a block (group: name). `argument_pattern` matches the opening of an argument (groups: key;
    text if the tag says that the value is a string), `call_end_pattern` the end of the call.
    `value_closing` is the tag after a value; `value_stops` are tags that also end it, with any
    white space between them. `padding`: characters that are removed around a value, only one on
    each side if `pads_once`.
    """

    begins: str
    opens: str
    closes: str
    ends: str
    around: str
    once: bool = False
    goes_on: str = ""
    stops: tuple[str, ...] = ()

    def reader(self, texts: frozenset[str]) -> "Tagged":
        """Return a stream for one call's arguments."""
        return Tagged(self, texts)

    @cached_property
    def outside(self) -> re.Pattern[str]:
        """Matches what comes between two values: an argument's opening, or the call's end."""
        return re.compile(f"{self.opens}|(?P<ends>{self.ends})", re.DOTALL)

    @cached_property
    def inside(self) -> re.Pattern[str]:
        """Matches the end of a value."""
        stops = "".join(f"|(?={re.escape(word)})" for word in self.stops).replace("><", r">\s*<")
        return re.compile(re.escape(self.closes) + stops)

    def certain(self, text: str) -> int:
        """Return the length of the part of a value's text that cannot be the beginning of its
        end.
        """
        last = text.rfind("<")
        for index in (text.rfind("<", 0, max(last, 0)), last):
            tail = APART.sub(">", text[index:])
            if index >= 0 and any(word.startswith(tail) for word in (self.closes, *self.stops)):
                return index
        return len(text)


class Tagged:
    """Converts one call's tagged arguments to JSON; `string_arguments` are those that are strings
    by its schema.
    """

    def __init__(self, form: Tags, texts: frozenset[str]) -> None:
        self.done = False
        self._form, self._texts, self._separator = form, texts, "{"
        self._value: _Value | None = None

    def take(self, text: str, over: bool) -> tuple[str, int]:
        """Return the JSON of a piece of text and the number of characters it has read."""
        out, position, progressed = list[str](), 0, True
        if self._separator == "{":
            out, self._separator = ["{"], ""
        while progressed and not self.done:
            step = self._in_value if self._value else self._between_values
            piece, used, progressed = step(text[position:], over)
            out.append(piece)
            position += used
        return "".join(out), position

    def _between_values(self, text: str, over: bool) -> tuple[str, int, bool]:
        match = self._form.outside.search(text)
        if match is None:
            return "", len(text) if over and CUT.fullmatch(text) else 0, False
        if match["ends"] is not None:
            self.done = True
            return "}", match.end(), False
        key = match["key"].strip()
        self._value = _Value(self._form, key in self._texts or bool(match.groupdict().get("text")))
        before, self._separator = self._separator, ", "
        return f"{before}{json.dumps(key, ensure_ascii=False)}: ", match.end(), True

    def _in_value(self, text: str, over: bool) -> tuple[str, int, bool]:
        value, match = self._value, self._form.inside.search(text)
        assert value
        if match:
            self._value = None
            return value.end(text[: match.start()]), match.end(), True
        used = self._form.certain(text)
        piece = value.feed(text[:used])
        return (piece + value.cut(), len(text), False) if over else (piece, used, False)


class _Value:
    """One argument's value. `text`: it is a string. feed() receives only text that certainly
    belongs to it.
    """

    def __init__(self, form: Tags, text: bool) -> None:
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
            words = words.removeprefix(form.around) if form.once else words.lstrip(form.around)
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
        self._may_be_json = text.startswith(WHOLE)
        is_word = any(word.startswith(text) or word == text.rstrip() for word in WORDS)
        return not (self._may_be_json or is_word or NUMBER.fullmatch(text))

    def _strip(self, words: str) -> str:
        form = self._form
        return words.removesuffix(form.around) if form.once else words.rstrip(form.around)


def _value(words: str) -> Any:
    try:
        return strict(words)
    except (ValueError, RecursionError):
        return words
