"""A call's arguments as Python's keywords, told while they come as the JSON object that they are.

A text is told in pieces; texts that stand side by side are one. Any other value is told when its
end is there: what Python would read as a number, a list or the like as that, and what it would not
as the text that it is. Nothing is run.
"""

import ast
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from llmcli.runtime.text import overlap
from llmcli.serve.calls.base import Form

# A function's name and what shows that keywords follow, or nothing.
CALL = r"(?P<name>[\w.-]+)\s*\((?=\s*(?:\)|[^\W\d]\w*\s*=))"
KEY = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
PART = re.compile(r"\s*\w*\s*")  # of a key
BLANK = re.compile(r"\s*")
END = re.compile(r"\s*\)")
OPENING = re.compile(r"([rR]|[uU]?)(\"\"\"|'''|\"|')")
OPENS = re.compile(r"[rRuU]?(?:\"{0,2}|'{0,2})")  # what may be the beginning of one
INSIDE = {quote: re.compile(rf"\\|{quote}") for quote in ('"""', "'''", '"', "'")}
OUTSIDE = re.compile(r"[\"'\[\]{}(),]|<\|")
HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(
    rf"\\(?:([0-7]{{1,3}})|(?:x({HEX}{{2}})|u({HEX}{{4}})|U({HEX}{{8}}))|N\{{([^{{}}]*)\}}|(.))",
    re.S,
)
ESCAPES = re.compile(
    rf"\\(?:[0-7]{{0,2}}|x{HEX}?|u{HEX}{{0,3}}|U{HEX}{{0,7}}|N(?:\{{[\w -]{{0,99}})?)"
)  # the same
LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
SURROGATES = re.compile("[\ud800-\udfff]")
WORDS = {"true": True, "false": False, "null": None}  # JSON's, which stand among Python's


@dataclass(frozen=True)
class Keywords(Form):
    """`begins` and `goes_on` are patterns that end with CALL."""

    begins: str
    goes_on: str = ""

    def reader(self, texts: frozenset[str]) -> "Keyed":
        """Of one call's arguments."""
        return Keyed(texts)


class Keyed:
    """One call's arguments on their way; `texts` are those that are text by its schema: a number is
    one there.
    """

    def __init__(self, texts: frozenset[str]) -> None:
        self.done = False
        self._texts, self._name = texts, ""
        self._before, self._step = "{", self._key
        self._quote, self._raw = "", False  # of the text that is open
        self._held, self._deep = list[str](), 0  # a value that is told when its end is there

    def take(self, text: str, over: bool) -> tuple[str, int]:
        """What of a text tells of them, as JSON, and how many characters that were."""
        out, at, moved = list[str](), 0, True
        if self._before == "{":
            out, self._before = ["{"], ""
        while moved and not self.done:
            step, before = self._step, at
            piece, at = step(text, at, over)
            out.append(piece)
            moved = at > before or self._step != step
        if over and not self.done:
            at = len(text)
        return "".join(out), at

    # What a text says from a place on, and the place behind that.

    def _key(self, text: str, at: int, over: bool) -> tuple[str, int]:
        if found := END.match(text, at):
            self.done = True
            return "}", found.end()
        if found := KEY.match(text, at):
            before, self._before, self._name, self._step = self._before, ", ", found[1], self._value
            return f"{before}{_json(self._name)}: ", found.end()
        self.done = not PART.fullmatch(text, at)
        return "", at

    def _value(self, text: str, at: int, over: bool) -> tuple[str, int]:
        at = _behind_blank(text, at)
        if OPENS.fullmatch(text, at) and not over:
            return "", at
        if found := self._opening(text, at):
            return '"', found
        self._step = self._whole
        return "", at

    def _opening(self, text: str, at: int) -> int:
        """Behind the mark that opens a text; 0 where none does."""
        found = OPENING.match(text, at)
        if found is None:
            return 0
        self._raw, self._quote, self._step = found[1] in ("r", "R"), found[2], self._text
        return found.end()

    def _text(self, text: str, at: int, over: bool) -> tuple[str, int]:
        found = INSIDE[self._quote].search(text, at)
        if found is None:
            end = max(at, len(text) - overlap(text, self._quote))
            return _escaped(text[at:end]), end
        said, start = _escaped(text[at : found.start()]), found.start()
        if found[0] == self._quote:
            self._quote, self._step = "", self._closed
            return said, found.end()
        if self._raw:
            end = start + 2
            return (said, start) if end > len(text) else (said + _escaped(text[start:end]), end)
        escape = ESCAPE.match(text, start)
        if escape is None or (ESCAPES.fullmatch(text, start) and not over):
            return said, start
        return said + _escaped(_meant(escape)), escape.end()

    def _closed(self, text: str, at: int, over: bool) -> tuple[str, int]:
        """Behind a text: another that goes on with it, or the next argument."""
        at = _behind_blank(text, at)
        if OPENS.fullmatch(text, at) and not over:
            return "", at
        if found := self._opening(text, at):
            return "", found
        first = text[at : at + 1]
        self._step, self.done = self._key, first not in (",", ")")
        return '"', at + (first == ",")

    def _whole(self, text: str, at: int, over: bool) -> tuple[str, int]:
        """A value that is no text, up to the comma or the bracket behind it."""
        start = at
        while found := (INSIDE[self._quote] if self._quote else OUTSIDE).search(text, at):
            sign, at = found[0], found.start()
            if sign == "\\":
                if at + 2 > len(text):
                    break
                at += 2
            elif sign == self._quote:
                self._quote, at = "", found.end()
            elif sign in ("'", '"'):
                if OPENS.fullmatch(text, at) and not over:
                    break
                opening = OPENING.match(text, at)
                assert opening
                self._quote, at = opening[2], opening.end()
            elif sign == "<|":  # a mark of the model's: the value was cut off
                self.done = True
                return "", at
            elif not self._deep and sign in (",", ")"):
                told = _read(
                    "".join([*self._held, text[start:at]]).strip(), self._name in self._texts
                )
                self._held, self._step = [], self._key
                return _json(told), at + (sign == ",")
            else:
                self._deep = max(0, self._deep + {"(": 1, "[": 1, "{": 1, ",": 0}.get(sign, -1))
                at += 1
        else:
            at = max(at, len(text) - overlap(text, self._quote or "<|"))
        self._held.append(text[start:at])
        return "", at


def _behind_blank(text: str, at: int) -> int:
    found = BLANK.match(text, at)
    assert found
    return found.end()


def _meant(escape: re.Match[str]) -> str:
    """The character that an escape of Python's stands for; one that is none is as it is."""
    octal, *codes, name, letter = escape.groups()
    code = next((one for one in codes if one), None)
    try:
        if octal or code:
            return chr(int(octal, 8) if octal else int(code or "", 16))
        if name is not None:
            return unicodedata.lookup(name)
    except (KeyError, ValueError, OverflowError):
        return escape[0]
    return LETTERS.get(letter, letter if letter in "\\'\"" else escape[0])


def _read(words: str, text: bool) -> Any:
    """A value as Python has it, read and never run; one that is none is text, and so is a number
    where `text` is.
    """
    try:
        found = _value(ast.parse(words, mode="eval").body)
        json.dumps(found, allow_nan=False)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return words
    return words if text and type(found) in (int, float) else found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_value(one) for one in values]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                str(_value(key)): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key
            }
        case ast.Constant() | ast.UnaryOp():
            found = ast.literal_eval(node)
            if isinstance(found, str | int | float | bool | None):
                return found
    raise ValueError(node)


def _json(value: Any) -> str:
    """With half characters as JSON writes them: two make one, and alone they are no UTF-8."""
    return SURROGATES.sub(
        lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


def _escaped(text: str) -> str:
    return _json(text)[1:-1]
