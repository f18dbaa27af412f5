"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`: Gemma 4, and FunctionGemma in words of its own.

Like JSON, but for keys without quotes and texts between marks, within which nothing is escaped. A forced call has JSON
for arguments, whose schema can be held; it is read, too.
"""

import json
import re
from typing import Any, ClassVar

from llmcli.serve.calls.base import Call, Family, Taken, within

HEAD = re.compile(r"call:([\w.-]+)\s*(?=\{)")
KEY = re.compile(r"\s*([^:,{}\[\]<>\s]+)\s*:")
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
            given = json.loads(rest)
        except ValueError:
            given, end = _Reader(rest, self.closes[1]).value(0)
            if rest[end:].strip():
                raise ValueError(rest) from None
        return Taken((Call(found[1], json.dumps(given, ensure_ascii=False)),), inner[1])

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
        text = self._text
        at += len(text[at:]) - len(text[at:].lstrip())
        if text.startswith(self._quote, at):
            end = text.index(self._quote, at + len(self._quote))
            return text[at + len(self._quote) : end], end + len(self._quote)
        if text.startswith("{", at):
            return self._several(at + 1, "}")
        if text.startswith("[", at):
            return self._several(at + 1, "]")
        found = PLAIN.match(text, at)
        if not found:
            raise ValueError(text[at:])
        word = found[0].strip()
        try:
            return json.loads(word), found.end()
        except ValueError:
            return word, found.end()

    def _several(self, at: int, end: str) -> tuple[Any, int]:
        text, keys, values = self._text, [], []
        while not text[at:].lstrip().startswith(end):
            if end == "}":
                key, at = self._key(at)
                keys.append(key)
            value, at = self.value(at)
            values.append(value)
            rest = text[at:].lstrip()
            at = len(text) - len(rest)
            if rest.startswith(","):
                at += 1
            elif not rest.startswith(end):
                raise ValueError(rest)
        at = text.index(end, at) + 1
        return (dict(zip(keys, values, strict=True)) if end == "}" else values), at

    def _key(self, at: int) -> tuple[str, int]:
        bare = self._text[at:].lstrip()
        if bare.startswith(self._quote):
            key, at = self.value(at)
            return str(key), self._text.index(":", at) + 1
        found = KEY.match(self._text, at)
        if not found:
            raise ValueError(bare)
        return found[1], found.end()


FAMILIES = (Gemma(), FunctionGemma())
