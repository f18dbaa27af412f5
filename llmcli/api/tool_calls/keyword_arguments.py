"""Converts arguments that are written as Python keywords, such as `key="text", other=3`, to JSON
while they arrive.

Strings are converted in pieces; adjacent string literals are joined, as in Python. Any other value
is converted when it is complete: a Python literal (number, list, …) becomes its JSON value,
anything else becomes a string. No code is run.
"""

import ast
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from llmcli.api.tool_calls.base import ArgumentFormat, encode_json_value, escape_json
from llmcli.runtime.text.detokenizer import overlap_length

# A function's name and an opening parenthesis, if a keyword or a closing parenthesis follows.
CALL_PATTERN = r"(?P<name>[\w.-]+)\s*\((?=\s*(?:\)|[^\W\d]\w*\s*=))"
KEY_PATTERN = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
PARTIAL_KEY_PATTERN = re.compile(r"\s*\w*\s*")  # the beginning of a key
BLANK_PATTERN = re.compile(r"\s*")
END_PATTERN = re.compile(r"\s*\)")
QUOTE_PATTERN = re.compile(r"([rR]|[uU]?)(\"\"\"|'''|\"|')")
PARTIAL_QUOTE_PATTERN = re.compile(
    r"[rRuU]?(?:\"{0,2}|'{0,2})"
)  # the beginning of an opening quote
IN_STRING_PATTERNS = {quote: re.compile(rf"\\|{quote}") for quote in ('"""', "'''", '"', "'")}
DELIMITER_PATTERN = re.compile(r"[\"'\[\]{}(),]|<\|")
HEX_DIGIT = "[0-9a-fA-F]"
ESCAPE_PATTERN = re.compile(
    rf"\\(?:([0-7]{{1,3}})|(?:x({HEX_DIGIT}{{2}})|u({HEX_DIGIT}{{4}})|U({HEX_DIGIT}{{8}}))|N\{{([^{{}}]*)\}}|(.))",
    re.S,
)
PARTIAL_ESCAPE_PATTERN = re.compile(
    rf"\\(?:[0-7]{{0,2}}|x{HEX_DIGIT}?|u{HEX_DIGIT}{{0,3}}|U{HEX_DIGIT}{{0,7}}|N(?:\{{[\w -]{{0,99}})?)"
)  # the beginning of an escape
ESCAPED_LETTERS = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\n": "",
}
# JSON's words, which some models write instead of Python's
JSON_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class KeywordArguments(ArgumentFormat):
    """Arguments as Python keywords. Both patterns match a call up to its arguments and end with
    CALL_PATTERN.
    """

    first_call_pattern: str
    next_call_pattern: str = ""

    def open_stream(self, string_arguments: frozenset[str]) -> "KeywordArgumentStream":
        """Return a converter for one call's arguments."""
        return KeywordArgumentStream(string_arguments)


class KeywordArgumentStream:
    """Converts the arguments of one call to JSON. `string_arguments`: the names of the arguments
    that the function's schema declares as strings; a number in such an argument becomes a string.
    """

    def __init__(self, string_arguments: frozenset[str]) -> None:
        self.is_complete = False
        self._string_arguments, self._name = string_arguments, ""
        self._separator, self._step = "{", self._read_key
        self._quote, self._raw = "", False  # the quote of the current string; whether it is raw
        # a value that is converted once it is complete, and the number of its open brackets
        self._pending, self._depth = list[str](), 0

    def feed(self, text: str, is_last: bool) -> tuple[str, int]:
        """Return the JSON for a piece of text, and the number of characters that were read from
        it.
        """
        out, position, progressed = list[str](), 0, True
        if self._separator == "{":
            out, self._separator = ["{"], ""
        while progressed and not self.is_complete:
            step, previous = self._step, position
            piece, position = step(text, position, is_last)
            out.append(piece)
            progressed = position > previous or self._step != step
        if is_last and not self.is_complete:
            position = len(text)
        return "".join(out), position

    # Each step method reads the text from a position on. It returns the JSON and the position after
    # the characters that were read.

    def _read_key(self, text: str, position: int, is_last: bool) -> tuple[str, int]:
        if match := END_PATTERN.match(text, position):
            self.is_complete = True
            return "}", match.end()
        if match := KEY_PATTERN.match(text, position):
            before, self._separator, self._name, self._step = (
                self._separator,
                ", ",
                match[1],
                self._read_value,
            )
            return f"{before}{encode_json_value(self._name)}: ", match.end()
        self.is_complete = not PARTIAL_KEY_PATTERN.fullmatch(text, position)
        return "", position

    def _read_value(self, text: str, position: int, is_last: bool) -> tuple[str, int]:
        """Decide from the beginning of a value whether it is a string."""
        position = _skip_blank(text, position)
        if PARTIAL_QUOTE_PATTERN.fullmatch(text, position) and not is_last:
            return "", position
        if end := self._open_string(text, position):
            return '"', end
        self._step = self._read_other
        return "", position

    def _open_string(self, text: str, position: int) -> int:
        """Return the position after the opening quote at `position`, and remember the quote. Return
        0 if there is no quote.
        """
        match = QUOTE_PATTERN.match(text, position)
        if match is None:
            return 0
        self._raw, self._quote, self._step = match[1] in ("r", "R"), match[2], self._read_string
        return match.end()

    def _read_string(self, text: str, position: int, is_last: bool) -> tuple[str, int]:
        """Read the text of a string, up to its closing quote or an incomplete escape."""
        match = IN_STRING_PATTERNS[self._quote].search(text, position)
        if match is None:
            end = max(position, len(text) - overlap_length(text, self._quote))
            return escape_json(text[position:end]), end
        escaped, start = escape_json(text[position : match.start()]), match.start()
        if match[0] == self._quote:
            self._quote, self._step = "", self._after_string
            return escaped, match.end()
        if self._raw:
            end = start + 2
            return (
                (escaped, start)
                if end > len(text)
                else (escaped + escape_json(text[start:end]), end)
            )
        escape = ESCAPE_PATTERN.match(text, start)
        if escape is None or (PARTIAL_ESCAPE_PATTERN.fullmatch(text, start) and not is_last):
            return escaped, start
        return escaped + escape_json(_unescape(escape)), escape.end()

    def _after_string(self, text: str, position: int, is_last: bool) -> tuple[str, int]:
        """Read the text after a string literal: another literal, which continues the string, or the
        comma or parenthesis that ends the argument.
        """
        position = _skip_blank(text, position)
        if PARTIAL_QUOTE_PATTERN.fullmatch(text, position) and not is_last:
            return "", position
        if end := self._open_string(text, position):
            return "", end
        first = text[position : position + 1]
        self._step, self.is_complete = self._read_key, first not in (",", ")")
        return '"', position + (first == ",")

    def _read_other(self, text: str, position: int, is_last: bool) -> tuple[str, int]:
        """Read a value that is not a string, up to the comma or bracket that ends it."""
        start = position
        while match := (
            IN_STRING_PATTERNS[self._quote] if self._quote else DELIMITER_PATTERN
        ).search(text, position):
            delimiter, position = match[0], match.start()
            if delimiter == "\\":
                if position + 2 > len(text):
                    break
                position += 2
            elif delimiter == self._quote:
                self._quote, position = "", match.end()
            elif delimiter in ("'", '"'):
                if PARTIAL_QUOTE_PATTERN.fullmatch(text, position) and not is_last:
                    break
                opening = QUOTE_PATTERN.match(text, position)
                assert opening
                self._quote, position = opening[2], opening.end()
            elif delimiter == "<|":  # a special token: the model did not complete the value
                self.is_complete = True
                return "", position
            elif not self._depth and delimiter in (",", ")"):
                value = _parse_literal(
                    "".join([*self._pending, text[start:position]]).strip(),
                    self._name in self._string_arguments,
                )
                self._pending, self._step = [], self._read_key
                return encode_json_value(value), position + (delimiter == ",")
            else:
                self._depth = max(
                    0, self._depth + {"(": 1, "[": 1, "{": 1, ",": 0}.get(delimiter, -1)
                )
                position += 1
        else:
            position = max(position, len(text) - overlap_length(text, self._quote or "<|"))
        self._pending.append(text[start:position])
        return "", position


def _skip_blank(text: str, position: int) -> int:
    match = BLANK_PATTERN.match(text, position)
    assert match
    return match.end()


def _unescape(escape: re.Match[str]) -> str:
    """Return the character of an escape in a Python string. An invalid escape is returned
    unchanged, as Python does.
    """
    octal, *codes, name, letter = escape.groups()
    code = next((digits for digits in codes if digits), None)
    try:
        if octal or code:
            return chr(int(octal, 8) if octal else int(code or "", 16))
        if name is not None:
            return unicodedata.lookup(name)
    except (KeyError, ValueError, OverflowError):
        return escape[0]
    return ESCAPED_LETTERS.get(letter, letter if letter in "\\'\"" else escape[0])


def _parse_literal(literal: str, is_string: bool) -> Any:
    """Return the value of a Python literal, without running code. Any other text is returned
    unchanged. If `is_string`, a number is returned as its text, too.
    """
    try:
        value = _literal_value(ast.parse(literal, mode="eval").body)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return literal
    return literal if is_string and type(value) in (int, float) else value


def _literal_value(node: ast.expr) -> Any:
    """Return the value of a literal's syntax tree as JSON-compatible values. Raises ValueError for
    anything else.
    """
    match node:
        case ast.Name(id=word) if word in JSON_WORDS:
            return JSON_WORDS[word]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_literal_value(item) for item in values]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                str(_literal_value(key)): _literal_value(value)
                for key, value in zip(keys, values, strict=True)
                if key
            }
        case ast.Constant() | ast.UnaryOp():
            literal = ast.literal_eval(node)
            if isinstance(literal, str | int | float | bool | None):
                return literal
    raise ValueError(node)
