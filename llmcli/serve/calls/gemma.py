"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`: Gemma 4, and FunctionGemma in words of its own.

Like JSON, but for keys without quotes and texts between marks, within which nothing is escaped. A forced call has JSON
for arguments, whose schema can be held; it is read, too. Gemma's own way is told whole: braces that do not close make
it text, not a call.
"""

import re
from typing import Any, ClassVar

from llmcli.serve.calls.base import Family, Taken, made, within
from llmcli.strict import strict

HEAD = re.compile(r"call:([\w.-]+)\s*(?=\{)")
KEY = re.compile(r"\s*([^:,{}\[\]<>\s]+)\s*:")
BLANK = re.compile(r"\s*")
PLAIN = re.compile(r"[^,{}\[\]<>]+")


class Gemma(Family):
    """Gemma 4."""

    name: ClassVar[str] = "gemma"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    opens: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    closes: ClassVar[tuple[str, ...]] = ("<tool_call|>", '<|"|>')
    begins: ClassVar[str] = r"<\|tool_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*\")"

    def take(self, text: str, over: bool) -> Taken | None:
        inner = within(text, self.opens[0], self.closes[0], over=False)  # what has no end may lack arguments
        if inner is None:
            if over:
                raise ValueError(text)
            return None
        found = HEAD.match(inner[0].strip())
        if not found:
            raise ValueError(text)
        rest = inner[0].strip()[found.end() :]
        try:
            given = strict(rest)
        except ValueError:
            given, end = _Reader(rest, self.closes[1]).value(0)
            if rest[end:].strip():
                raise ValueError(rest) from None
        return Taken((made(found[1], given),), inner[1])

    def frame(self, name: str) -> tuple[str, str]:
        return f"{self.opens[0]}call:{name}", self.closes[0]

    @property
    def around(self) -> tuple[str, str | None, str]:
        return "", "", ""


class FunctionGemma(Gemma):
    """Gemma 3 of 270 million parameters that was made for calls."""

    name: ClassVar[str] = "functiongemma"
    marks: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    opens: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    closes: ClassVar[tuple[str, ...]] = ("<end_function_call>", "<escape>")
    begins: ClassVar[str] = r"<start_function_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*\")"


class _Reader:
    """Values out of a text, each with the place behind it; raises ValueError."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote = text, quote

    def value(self, at: int) -> tuple[Any, int]:
        text, quote = self._text, self._quote
        at = self._skip(at)
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
        if text.startswith("{", at):
            return self._several(at + 1, "}")
        if text.startswith("[", at):
            return self._several(at + 1, "]")
        found = PLAIN.match(text, at)
        if not found:
            raise ValueError(text[at:])
        word = found[0].strip()
        try:
            return strict(word), found.end()
        except ValueError:
            return word, found.end()

    def _several(self, at: int, end: str) -> tuple[Any, int]:
        text, keys, values = self._text, [], []
        at = self._skip(at)
        while not text.startswith(end, at):
            if end == "}":
                key, at = self._key(at)
                keys.append(key)
            value, at = self.value(at)
            values.append(value)
            at = self._skip(at)
            if text.startswith(",", at):
                at = self._skip(at + 1)
            elif not text.startswith(end, at):
                raise ValueError(text[at:])
        return (dict(zip(keys, values, strict=True)) if end == "}" else values), at + 1

    def _key(self, at: int) -> tuple[str, int]:
        if self._text.startswith(self._quote, at):
            key, at = self.value(at)
            return str(key), self._text.index(":", at) + 1
        found = KEY.match(self._text, at)
        if not found:
            raise ValueError(self._text[at:])
        return found[1], found.end()

    def _skip(self, at: int) -> int:
        """Behind the white space."""
        found = BLANK.match(self._text, at)
        assert found
        return found.end()


FAMILIES = (Gemma(), FunctionGemma())
