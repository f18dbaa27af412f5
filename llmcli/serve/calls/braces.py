"""Arguments in braces whose keys have no quotes and whose texts stand between marks, told while
they come as JSON.
"""

import json
import re
from dataclasses import dataclass

from llmcli.runtime.text import overlap
from llmcli.serve.calls.base import Form
from llmcli.strict import strict

KEY = re.compile(r"([^:,{}\[\]<>\s]+)\s*:")
PART = re.compile(r"[^:,{}\[\]<>\s]*\s*")  # of a key
BLANK = re.compile(r"\s*")
BARE = re.compile(r"[^,{}\[\]<>]+")
PAIRS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Braces(Form):
    """`begins` is the pattern of a call up to its brace (a group: name), `quote` the mark around a
    text.
    """

    begins: str
    quote: str
    goes_on: str = ""

    def reader(self, texts: frozenset[str]) -> "Braced":
        """Of one call's arguments."""
        return Braced(self.quote, texts)


class Braced:
    """One call's arguments on their way; `texts` are those that are text by its schema."""

    def __init__(self, quote: str, texts: frozenset[str]) -> None:
        self.done = False
        self._quote, self._texts, self._key = quote, texts, ""
        self._open = list[str]()
        # What comes next: a value, a key, the colon behind a quoted one, a comma; where a list or
        # an object has just begun its end may, too.
        self._next, self._empty, self._inside = "value", False, False

    def take(self, text: str, over: bool) -> tuple[str, int]:
        """What of a text tells of them, as JSON, and how many characters that were."""
        out, at, moved = list[str](), 0, True
        while moved and not self.done:
            before = at
            piece, at = self._text(text, at) if self._inside else self._mark(text, at)
            out.append(piece)
            moved = at > before
        if (
            over and not self.done
        ):  # half a mark, or a word of which nobody knows whether it is whole
            at = len(text)
        return "".join(out), at

    # What a text says from a place on, and the place behind that.

    def _text(self, text: str, at: int) -> tuple[str, int]:
        end = text.find(self._quote, at)
        if end >= 0:
            self._inside, self._next = False, "colon" if self._next == "key" else "comma"
            return _escaped(text[at:end]) + '"', end + len(self._quote)
        end = max(at, len(text) - overlap(text, self._quote))
        return _escaped(text[at:end]), end

    def _mark(self, text: str, at: int) -> tuple[str, int]:
        found = BLANK.match(text, at)
        assert found
        at = found.end()
        first = text[at : at + 1]
        ends = self._open and first == self._open[-1] and (self._next == "comma" or self._empty)
        if ends or (first in (",", ":") and self._next == {",": "comma", ":": "colon"}[first]):
            return self._sign(first), at + 1
        if self._next in ("value", "key") and text.startswith(self._quote, at):
            self._inside, self._empty = True, False
            return '"', at + len(self._quote)
        if self._quote.startswith(text[at : at + len(self._quote)]):  # a part of it, or nothing
            return "", at
        piece, end = self._word(text, at)
        self.done = end == at and not self._waits(text, at)
        return piece, end

    def _sign(self, sign: str) -> str:
        """A comma, a colon or an end."""
        if sign in PAIRS.values():
            self._open.pop()
            self._next, self._empty, self.done = "comma", False, not self._open
            return sign
        self._next = "value" if sign == ":" or self._open[-1] == "]" else "key"
        return sign + " "

    def _word(self, text: str, at: int) -> tuple[str, int]:
        """A key, or a value without marks."""
        first = text[at]
        if self._next == "key":
            if found := KEY.match(text, at):
                self._next, self._empty, self._key = (
                    "value",
                    False,
                    found[1] if len(self._open) == 1 else "",
                )
                return json.dumps(found[1], ensure_ascii=False) + ": ", found.end()
        elif self._next == "value" and first in PAIRS:
            self._open.append(PAIRS[first])
            self._next, self._empty = "key" if first == "{" else "value", True
            return first, at + 1
        elif (
            self._next == "value"
            and (found := BARE.match(text, at))
            and found.end() < len(text)
            and self._open
        ):
            known = len(self._open) == 1 and self._key in self._texts
            self._next, self._empty = "comma", False
            return _told(found[0].strip(), known), found.end()
        return "", at

    def _waits(self, text: str, at: int) -> bool:
        """Whether more may make a word of this."""
        pattern = {"key": PART, "value": BARE}.get(self._next)
        return bool(pattern and pattern.fullmatch(text, at))


def _told(word: str, text: bool) -> str:
    try:
        return json.dumps(word if text else strict(word), ensure_ascii=False)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
