"""Arguments in braces with unquoted keys and strings between marks, converted to JSON while they
arrive.
"""

import json
import re
from dataclasses import dataclass

from llmcli.api.tool_calls.base import Form
from llmcli.runtime.text.detokenizer import overlap
from llmcli.strict_json import strict

KEY = re.compile(r"([^:,{}\[\]<>\s]+)\s*:")
PART = re.compile(r"[^:,{}\[\]<>\s]*\s*")  # the beginning of a key
BLANK = re.compile(r"\s*")
BARE = re.compile(r"[^,{}\[\]<>]+")
PAIRS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Braces(Form):
    """Arguments in braces. The call pattern matches up to the brace (group: name); `quote` is the
    mark around strings.
    """

    begins: str
    quote: str
    goes_on: str = ""

    def reader(self, texts: frozenset[str]) -> "Braced":
        """Return a stream for one call's arguments."""
        return Braced(self.quote, texts)


class Braced:
    """Converts one call's arguments in braces to JSON; `string_arguments` are those that are
    strings by its schema.
    """

    def __init__(self, quote: str, texts: frozenset[str]) -> None:
        self.done = False
        self._quote, self._texts, self._key = quote, texts, ""
        self._open = list[str]()
        # What comes next: a value, a key, the colon after a quoted key, or a comma. `_is_empty`: a
        # list or an object has just begun, so its end may also follow.
        self._expected, self._is_empty, self._in_string = "value", False, False

    def take(self, text: str, over: bool) -> tuple[str, int]:
        """Return the JSON of a piece of text and the number of characters it has read."""
        out, at, moved = list[str](), 0, True
        while moved and not self.done:
            before = at
            piece, at = self._text(text, at) if self._in_string else self._mark(text, at)
            out.append(piece)
            moved = at > before
        if over and not self.done:
            at = len(text)  # drop a partial mark, or a word that may be incomplete
        return "".join(out), at

    # Each step reads the text from a position and returns JSON and the position after it.

    def _text(self, text: str, at: int) -> tuple[str, int]:
        end = text.find(self._quote, at)
        if end >= 0:
            self._in_string, self._expected = False, "colon" if self._expected == "key" else "comma"
            return _escape(text[at:end]) + '"', end + len(self._quote)
        end = max(at, len(text) - overlap(text, self._quote))
        return _escape(text[at:end]), end

    def _mark(self, text: str, at: int) -> tuple[str, int]:
        blank = BLANK.match(text, at)
        assert blank
        at = blank.end()
        first = text[at : at + 1]
        ends = (
            self._open and first == self._open[-1] and (self._expected == "comma" or self._is_empty)
        )
        if ends or (first in (",", ":") and self._expected == {",": "comma", ":": "colon"}[first]):
            return self._sign(first), at + 1
        if self._expected in ("value", "key") and text.startswith(self._quote, at):
            self._in_string, self._is_empty = True, False
            return '"', at + len(self._quote)
        # a part of the mark, or nothing
        if self._quote.startswith(text[at : at + len(self._quote)]):
            return "", at
        piece, end = self._word(text, at)
        self.done = end == at and not self._may_continue(text, at)
        return piece, end

    def _sign(self, sign: str) -> str:
        """Read a comma, a colon or a closing bracket."""
        if sign in PAIRS.values():
            self._open.pop()
            self._expected, self._is_empty, self.done = "comma", False, not self._open
            return sign
        self._expected = "value" if sign == ":" or self._open[-1] == "]" else "key"
        return sign + " "

    def _word(self, text: str, at: int) -> tuple[str, int]:
        """Read a key, or a value without marks."""
        first = text[at]
        if self._expected == "key":
            if match := KEY.match(text, at):
                self._expected, self._is_empty, self._key = (
                    "value",
                    False,
                    match[1] if len(self._open) == 1 else "",
                )
                return json.dumps(match[1], ensure_ascii=False) + ": ", match.end()
        elif self._expected == "value" and first in PAIRS:
            self._open.append(PAIRS[first])
            self._expected, self._is_empty = "key" if first == "{" else "value", True
            return first, at + 1
        elif (
            self._expected == "value"
            and (match := BARE.match(text, at))
            and match.end() < len(text)
            and self._open
        ):
            is_text = len(self._open) == 1 and self._key in self._texts
            self._expected, self._is_empty = "comma", False
            return _json_value(match[0].strip(), is_text), match.end()
        return "", at

    def _may_continue(self, text: str, at: int) -> bool:
        """Return whether more text may complete a word at this position."""
        pattern = {"key": PART, "value": BARE}.get(self._expected)
        return bool(pattern and pattern.fullmatch(text, at))


def _json_value(word: str, text: bool) -> str:
    try:
        return json.dumps(word if text else strict(word), ensure_ascii=False)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
