"""Converts arguments in braces, such as `{key:<|"|>text<|"|>}`, to JSON while they arrive. Keys
have no quotes, and strings are between marks instead of quotes.
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
    """Arguments in braces. `first_call_pattern` and `next_call_pattern` match a call up to its
    opening brace, with the function's name in the group `name`. `quote`: the mark before and after
    a string.
    """

    first_call_pattern: str
    quote: str
    next_call_pattern: str = ""

    def open_stream(self, string_arguments: frozenset[str]) -> "BraceArgumentStream":
        """Return a converter for one call's arguments."""
        return BraceArgumentStream(self.quote, string_arguments)


class BraceArgumentStream:
    """Converts the arguments of one call to JSON. `string_arguments`: the names of the arguments
    that the function's schema declares as strings.
    """

    def __init__(self, quote: str, string_arguments: frozenset[str]) -> None:
        self.is_complete = False
        self._quote, self._string_arguments, self._key = quote, string_arguments, ""
        self._open = list[str]()
        # `_expected`: what may come next (a value, a key, the colon after a quoted key, or a
        # comma). `_is_empty`: the list or object has no entry yet, so it may end here, too.
        self._expected, self._is_empty, self._in_string = "value", False, False

    def feed(self, text: str, is_last: bool) -> tuple[str, int]:
        """Return the JSON for a piece of text, and the number of characters that were read from
        it.
        """
        out, position, progressed = list[str](), 0, True
        while progressed and not self.is_complete:
            previous = position
            piece, position = (
                self._read_string(text, position)
                if self._in_string
                else self._read_token(text, position)
            )
            out.append(piece)
            progressed = position > previous
        if is_last and not self.is_complete:
            position = len(text)  # drop an incomplete mark or word
        return "".join(out), position

    # The _read methods read the text from a position on. They return the JSON and the position
    # after the characters that were read.

    def _read_string(self, text: str, position: int) -> tuple[str, int]:
        """Read the text of a string, up to the mark that ends it or may begin to end it."""
        end = text.find(self._quote, position)
        if end >= 0:
            self._in_string, self._expected = False, "colon" if self._expected == "key" else "comma"
            return escape_json(text[position:end]) + '"', end + len(self._quote)
        end = max(position, len(text) - overlap_length(text, self._quote))
        return escape_json(text[position:end]), end

    def _read_token(self, text: str, position: int) -> tuple[str, int]:
        """Read the next punctuation character, opening mark of a string, or word."""
        blank = BLANK_PATTERN.match(text, position)
        assert blank
        position = blank.end()
        first = text[position : position + 1]
        ends = (
            self._open and first == self._open[-1] and (self._expected == "comma" or self._is_empty)
        )
        if ends or (first in (",", ":") and self._expected == {",": "comma", ":": "colon"}[first]):
            return self._read_punctuation(first), position + 1
        if self._expected in ("value", "key") and text.startswith(self._quote, position):
            self._in_string, self._is_empty = True, False
            return '"', position + len(self._quote)
        # an incomplete mark, or the end of the text
        if self._quote.startswith(text[position : position + len(self._quote)]):
            return "", position
        piece, end = self._read_word(text, position)
        self.is_complete = end == position and not self._may_continue(text, position)
        return piece, end

    def _read_punctuation(self, punctuation: str) -> str:
        """Return the JSON for a comma, a colon or a closing bracket."""
        if punctuation in CLOSING_BRACKETS.values():
            self._open.pop()
            self._expected, self._is_empty, self.is_complete = "comma", False, not self._open
            return punctuation
        self._expected = "value" if punctuation == ":" or self._open[-1] == "]" else "key"
        return punctuation + " "

    def _read_word(self, text: str, position: int) -> tuple[str, int]:
        """Read a key, an opening bracket, or a value that is not between marks."""
        first = text[position]
        if self._expected == "key":
            if match := KEY_PATTERN.match(text, position):
                self._expected, self._is_empty, self._key = (
                    "value",
                    False,
                    match[1] if len(self._open) == 1 else "",
                )
                return json.dumps(match[1], ensure_ascii=False) + ": ", match.end()
        elif self._expected == "value" and first in CLOSING_BRACKETS:
            self._open.append(CLOSING_BRACKETS[first])
            self._expected, self._is_empty = "key" if first == "{" else "value", True
            return first, position + 1
        elif (
            self._expected == "value"
            and (match := BARE_WORD_PATTERN.match(text, position))
            and match.end() < len(text)
            and self._open
        ):
            is_string = len(self._open) == 1 and self._key in self._string_arguments
            self._expected, self._is_empty = "comma", False
            return _json_value(match[0].strip(), is_string), match.end()
        return "", position

    def _may_continue(self, text: str, position: int) -> bool:
        """Return whether the text from this position on may be the beginning of an incomplete key
        or value.
        """
        pattern = {"key": PARTIAL_KEY_PATTERN, "value": BARE_WORD_PATTERN}.get(self._expected)
        return bool(pattern and pattern.fullmatch(text, position))


def _json_value(word: str, is_string: bool) -> str:
    try:
        return json.dumps(word if is_string else parse_strict_json(word), ensure_ascii=False)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
