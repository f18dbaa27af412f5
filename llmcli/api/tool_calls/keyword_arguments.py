"""Arguments as Python keywords. They are converted to JSON while they arrive.

Strings are streamed in pieces; adjacent string literals are joined. Any other value is converted
once it is complete: a Python literal (number, list, …) becomes its JSON value, anything else
becomes a string. No code is run.
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
    """The format of keyword arguments. Both patterns end with CALL_PATTERN."""

    first_call_pattern: str
    next_call_pattern: str = ""

    def open_stream(self, string_arguments: frozenset[str]) -> "KeywordArgumentStream":
        """Return a stream for one call's arguments."""
        return KeywordArgumentStream(string_arguments)


class KeywordArgumentStream:
    """Converts one call's keyword arguments to JSON. `string_arguments`: the arguments that are
    strings by the function's schema; a number in such an argument becomes text.
    """

    def __init__(self, string_arguments: frozenset[str]) -> None:
        self.is_complete = False
        self._texts, self._name = string_arguments, ""
        self._separator, self._step = "{", self._read_key
        self._quote, self._raw = "", False  # of the string that is being read
        # a value that is converted once it is complete, and the number of its open brackets
        self._pending, self._depth = list[str](), 0

    def feed(self, text: str, is_last: bool) -> tuple[str, int]:
        """Return the JSON of a piece of text and the number of characters it has read."""
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

    # Each step reads the text from a position and returns the JSON and the position after the part
    # that was read.

    def _read_key(self, text: str, at: int, over: bool) -> tuple[str, int]:
        if match := END_PATTERN.match(text, at):
            self.is_complete = True
            return "}", match.end()
        if match := KEY_PATTERN.match(text, at):
            before, self._separator, self._name, self._step = (
                self._separator,
                ", ",
                match[1],
                self._value,
            )
            return f"{before}{encode_json_value(self._name)}: ", match.end()
        self.is_complete = not PARTIAL_KEY_PATTERN.fullmatch(text, at)
        return "", at

    def _value(self, text: str, at: int, over: bool) -> tuple[str, int]:
        at = _skip_blank(text, at)
        if PARTIAL_QUOTE_PATTERN.fullmatch(text, at) and not over:
            return "", at
        if end := self._open_string(text, at):
            return '"', end
        self._step = self._read_other
        return "", at

    def _open_string(self, text: str, at: int) -> int:
        """Return the position after the opening quote at `at`; 0 if there is no quote."""
        match = QUOTE_PATTERN.match(text, at)
        if match is None:
            return 0
        self._raw, self._quote, self._step = match[1] in ("r", "R"), match[2], self._read_string
        return match.end()

    def _read_string(self, text: str, at: int, over: bool) -> tuple[str, int]:
        match = IN_STRING_PATTERNS[self._quote].search(text, at)
        if match is None:
            end = max(at, len(text) - overlap_length(text, self._quote))
            return escape_json(text[at:end]), end
        said, start = escape_json(text[at : match.start()]), match.start()
        if match[0] == self._quote:
            self._quote, self._step = "", self._after_string
            return said, match.end()
        if self._raw:
            end = start + 2
            return (said, start) if end > len(text) else (said + escape_json(text[start:end]), end)
        escape = ESCAPE_PATTERN.match(text, start)
        if escape is None or (PARTIAL_ESCAPE_PATTERN.fullmatch(text, start) and not over):
            return said, start
        return said + escape_json(_unescape(escape)), escape.end()

    def _after_string(self, text: str, at: int, over: bool) -> tuple[str, int]:
        """Read the text after a string: another literal that continues the string, or the end of
        the argument.
        """
        at = _skip_blank(text, at)
        if PARTIAL_QUOTE_PATTERN.fullmatch(text, at) and not over:
            return "", at
        if end := self._open_string(text, at):
            return "", end
        first = text[at : at + 1]
        self._step, self.is_complete = self._read_key, first not in (",", ")")
        return '"', at + (first == ",")

    def _read_other(self, text: str, at: int, over: bool) -> tuple[str, int]:
        """Read a value that is not a string, up to the comma or bracket that ends it."""
        start = at
        while match := (
            IN_STRING_PATTERNS[self._quote] if self._quote else DELIMITER_PATTERN
        ).search(text, at):
            sign, at = match[0], match.start()
            if sign == "\\":
                if at + 2 > len(text):
                    break
                at += 2
            elif sign == self._quote:
                self._quote, at = "", match.end()
            elif sign in ("'", '"'):
                if PARTIAL_QUOTE_PATTERN.fullmatch(text, at) and not over:
                    break
                opening = QUOTE_PATTERN.match(text, at)
                assert opening
                self._quote, at = opening[2], opening.end()
            elif sign == "<|":  # a special token: the model did not complete the value
                self.is_complete = True
                return "", at
            elif not self._depth and sign in (",", ")"):
                value = _parse_literal(
                    "".join([*self._pending, text[start:at]]).strip(), self._name in self._texts
                )
                self._pending, self._step = [], self._read_key
                return encode_json_value(value), at + (sign == ",")
            else:
                self._depth = max(0, self._depth + {"(": 1, "[": 1, "{": 1, ",": 0}.get(sign, -1))
                at += 1
        else:
            at = max(at, len(text) - overlap_length(text, self._quote or "<|"))
        self._pending.append(text[start:at])
        return "", at


def _skip_blank(text: str, at: int) -> int:
    match = BLANK_PATTERN.match(text, at)
    assert match
    return match.end()


def _unescape(escape: re.Match[str]) -> str:
    """Return the character that a Python escape stands for; an invalid escape stays as it is."""
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


def _parse_literal(words: str, text: bool) -> Any:
    """Return the value of a Python literal, without running code. Other words are returned as text.
    If `text` is true, numbers are returned as text, too.
    """
    try:
        value = _value(ast.parse(words, mode="eval").body)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return words
    return words if text and type(value) in (int, float) else value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in JSON_WORDS:
            return JSON_WORDS[word]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_value(item) for item in values]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                str(_value(key)): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key
            }
        case ast.Constant() | ast.UnaryOp():
            literal = ast.literal_eval(node)
            if isinstance(literal, str | int | float | bool | None):
                return literal
    raise ValueError(node)
