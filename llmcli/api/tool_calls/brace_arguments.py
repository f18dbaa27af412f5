"""Arguments in braces, with unquoted keys and with strings between marks. They are converted to
JSON while they arrive.
"""

import json
import re
from dataclasses import dataclass

from llmcli.api.tool_calls.base import ArgumentFormat, escape_json
from llmcli.runtime.text.detokenizer import overlap_length
from llmcli.strict_json import parse_strict_json

KEY_PATTERN = re.compile(r"([^:,{}\[\]<>\s]+)\s*:")
PARTIAL_KEY_PATTERN = re.compile(r"[^:,{}\[\]<>\s]*\s*")  # the beginning of a key
BLANK_PATTERN = re.compile(r"\s*")
BARE_WORD_PATTERN = re.compile(r"[^,{}\[\]<>]+")
CLOSING_BRACKETS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class BraceArguments(ArgumentFormat):
    """The format of arguments in braces. `first_call_pattern` and `next_call_pattern` match a call
    up to its opening brace (group: name); `quote`: the mark around strings.
    """

    first_call_pattern: str
    quote: str
    next_call_pattern: str = ""

    def open_stream(self, string_arguments: frozenset[str]) -> "BraceArgumentStream":
        """Return a stream for one call's arguments."""
        return BraceArgumentStream(self.quote, string_arguments)


class BraceArgumentStream:
    """Converts the braces of one call's arguments to JSON. `string_arguments`: the arguments that
    are strings by the function's schema.
    """

    def __init__(self, quote: str, string_arguments: frozenset[str]) -> None:
        self.is_complete = False
        self._quote, self._texts, self._key = quote, string_arguments, ""
        self._open = list[str]()
        # `_expected`: what may come next (a value, a key, the colon after a quoted key, or a
        # comma). `_is_empty`: the list or object has no entry yet, so it may end here, too.
        self._expected, self._is_empty, self._in_string = "value", False, False

    def feed(self, text: str, is_last: bool) -> tuple[str, int]:
        """Return the JSON of a piece of text and the number of characters it has read."""
        out, at, moved = list[str](), 0, True
        while moved and not self.is_complete:
            before = at
            piece, at = self._text(text, at) if self._in_string else self._mark(text, at)
            out.append(piece)
            moved = at > before
        if is_last and not self.is_complete:
            at = len(text)  # drop an incomplete mark, and a word that may be incomplete
        return "".join(out), at

    # Each step reads the text from a position and returns the JSON and the position after the part
    # that was read.

    def _text(self, text: str, at: int) -> tuple[str, int]:
        end = text.find(self._quote, at)
        if end >= 0:
            self._in_string, self._expected = False, "colon" if self._expected == "key" else "comma"
            return escape_json(text[at:end]) + '"', end + len(self._quote)
        end = max(at, len(text) - overlap_length(text, self._quote))
        return escape_json(text[at:end]), end

    def _mark(self, text: str, at: int) -> tuple[str, int]:
        blank = BLANK_PATTERN.match(text, at)
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
        # an incomplete mark, or the end of the text
        if self._quote.startswith(text[at : at + len(self._quote)]):
            return "", at
        piece, end = self._word(text, at)
        self.is_complete = end == at and not self._may_continue(text, at)
        return piece, end

    def _sign(self, sign: str) -> str:
        """Return the JSON for a comma, a colon or a closing bracket."""
        if sign in CLOSING_BRACKETS.values():
            self._open.pop()
            self._expected, self._is_empty, self.is_complete = "comma", False, not self._open
            return sign
        self._expected = "value" if sign == ":" or self._open[-1] == "]" else "key"
        return sign + " "

    def _word(self, text: str, at: int) -> tuple[str, int]:
        """Read a key, or a value that is not between marks."""
        first = text[at]
        if self._expected == "key":
            if match := KEY_PATTERN.match(text, at):
                self._expected, self._is_empty, self._key = (
                    "value",
                    False,
                    match[1] if len(self._open) == 1 else "",
                )
                return json.dumps(match[1], ensure_ascii=False) + ": ", match.end()
        elif self._expected == "value" and first in CLOSING_BRACKETS:
            self._open.append(CLOSING_BRACKETS[first])
            self._expected, self._is_empty = "key" if first == "{" else "value", True
            return first, at + 1
        elif (
            self._expected == "value"
            and (match := BARE_WORD_PATTERN.match(text, at))
            and match.end() < len(text)
            and self._open
        ):
            is_text = len(self._open) == 1 and self._key in self._texts
            self._expected, self._is_empty = "comma", False
            return _json_value(match[0].strip(), is_text), match.end()
        return "", at

    def _may_continue(self, text: str, at: int) -> bool:
        """Return whether more text may complete a word at this position."""
        pattern = {"key": PARTIAL_KEY_PATTERN, "value": BARE_WORD_PATTERN}.get(self._expected)
        return bool(pattern and pattern.fullmatch(text, at))


def _json_value(word: str, text: bool) -> str:
    try:
        return json.dumps(word if text else parse_strict_json(word), ensure_ascii=False)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
