"""Arguments between tags, told while they come as the JSON object that they are.

A value is text where the function's schema says so, or where it can be no JSON by what came of it:
such a value is told in pieces. What may be JSON (a number, or what begins with a bracket or a
quotation mark) is told when its end is there.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmcli.serve.calls.base import Form
from llmcli.strict import strict

WORDS = "true", "false", "null"
WHOLE = "{", "[", '"'
NUMBER = re.compile(r"[-+.\deE]*\s*")
APART = re.compile(r">\s+(?=<|$)")
CUT = re.compile(r"\s*(<[^>]*|<\S*\s*(<\S*)?)?")  # what there may be of a tag where the answer ends


@dataclass(frozen=True)
class Tags(Form):
    """How a call is written: `begins` is the pattern of its head, `goes_on` that of a later one's
    in the same block (a group: name), `opens` that of an argument's (groups: key, and text where it
    says itself that it is one), `ends` that of the call's end. `closes` stands behind a value;
    `stops` do not belong to it, white space between their tags or none. `around` a value stands
    what is none of it, `once`: one of it on each side.
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
        """Of one call's arguments."""
        return Tagged(self, texts)

    @cached_property
    def outside(self) -> re.Pattern[str]:
        """What comes next between two values."""
        return re.compile(f"{self.opens}|(?P<ends>{self.ends})", re.DOTALL)

    @cached_property
    def inside(self) -> re.Pattern[str]:
        """What ends a value."""
        stops = "".join(f"|(?={re.escape(word)})" for word in self.stops).replace("><", r">\s*<")
        return re.compile(re.escape(self.closes) + stops)

    def certain(self, text: str) -> int:
        """How much of a value's text cannot be the beginning of what ends it."""
        last = text.rfind("<")
        for at in (text.rfind("<", 0, max(last, 0)), last):
            tail = APART.sub(">", text[at:])
            if at >= 0 and any(word.startswith(tail) for word in (self.closes, *self.stops)):
                return at
        return len(text)


class Tagged:
    """One call's arguments on their way; `texts` are those that are text by its schema."""

    def __init__(self, form: Tags, texts: frozenset[str]) -> None:
        self.done = False
        self._form, self._texts, self._before = form, texts, "{"
        self._value: _Value | None = None

    def take(self, text: str, over: bool) -> tuple[str, int]:
        """What of a text tells of them, as JSON, and how many characters that were."""
        out, at, moved = list[str](), 0, True
        if self._before == "{":
            out, self._before = ["{"], ""
        while moved and not self.done:
            step = self._inside if self._value else self._outside
            piece, used, moved = step(text[at:], over)
            out.append(piece)
            at += used
        return "".join(out), at

    def _outside(self, text: str, over: bool) -> tuple[str, int, bool]:
        found = self._form.outside.search(text)
        if found is None:
            return "", len(text) if over and CUT.fullmatch(text) else 0, False
        if found["ends"] is not None:
            self.done = True
            return "}", found.end(), False
        key = found["key"].strip()
        self._value = _Value(self._form, key in self._texts or bool(found.groupdict().get("text")))
        before, self._before = self._before, ", "
        return f"{before}{json.dumps(key, ensure_ascii=False)}: ", found.end(), True

    def _inside(self, text: str, over: bool) -> tuple[str, int, bool]:
        value, found = self._value, self._form.inside.search(text)
        assert value
        if found:
            self._value = None
            return value.end(text[: found.start()]), found.end(), True
        used = self._form.certain(text)
        piece = value.feed(text[:used])
        return (piece + value.cut(), len(text), False) if over else (piece, used, False)


class _Value:
    """One argument's value, which `text` says to be one; fed with what certainly is of it."""

    def __init__(self, form: Tags, text: bool) -> None:
        self._form, self._text, self._opened, self._begun, self._whole = (
            form,
            text,
            False,
            False,
            False,
        )
        self._held = list[str]()

    def feed(self, words: str) -> str:
        """What it tells."""
        form = self._form
        if not self._begun:
            words = words.removeprefix(form.around) if form.once else words.lstrip(form.around)
            self._begun = bool(words)
        self._held.append(words)
        if self._whole or not (self._text or self._plain()):
            return ""
        words, self._text = "".join(self._held), True
        body = self._stripped(words)
        self._held = [words[len(body) :]]
        before, self._opened = "" if self._opened else '"', True
        return before + json.dumps(body, ensure_ascii=False)[1:-1]

    def end(self, words: str) -> str:
        """The same, and what is left now that all of it was given."""
        piece = self.feed(words)
        if self._opened:
            return piece + '"'
        return json.dumps(_value(self._stripped("".join(self._held))), ensure_ascii=False)

    def cut(self) -> str:
        """What is left where the answer ends in the middle of it."""
        return "" if self._opened else self._stripped("".join(self._held))

    def _plain(self) -> bool:
        """Whether what is held cannot be the beginning of JSON."""
        text = "".join(self._held).lstrip()
        self._whole = text.startswith(WHOLE)
        known = any(word.startswith(text) or word == text.rstrip() for word in WORDS)
        return not (self._whole or known or NUMBER.fullmatch(text))

    def _stripped(self, words: str) -> str:
        form = self._form
        return words.removesuffix(form.around) if form.once else words.rstrip(form.around)


def _value(words: str) -> Any:
    try:
        return strict(words)
    except (ValueError, RecursionError):
        return words
