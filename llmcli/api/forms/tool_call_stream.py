"""Streams the tool calls of one block: each call's name, then its arguments in pieces.

A call counts from where its arguments begin, because what was streamed cannot be taken back. The
arguments are what the model wrote; if they are cut off or are not JSON they simply end there, in a
document as in a stream.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from llmcli.api.tool_calls.base import Call, Digits, Family, Written
from llmcli.strict_json import strict

# Characters that change the state, inside and outside of a string. Outside of a string only words
# and numbers may appear besides.
INSIDE, OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]|[^\s\w.,:+-]')
CONTROLS = {code: f"\\u{code:04x}" for code in range(32)} | {9: "\\t", 10: "\\n", 13: "\\r"}
PAIRS = {"{": "}", "[": "]"}
CUTS = 256  # attempts at completing a text that was cut off
BETWEEN = " \t\r\n}],;`"
ID = re.compile(r',\s*"id"\s*:\s*"[^"]*"')  # Mistral writes it after the arguments


@dataclass(frozen=True, slots=True)
class Heard:
    """A piece of an answer: thinking, content, the start of a call, a piece of its arguments, or
    its end. The `call` of a start has no arguments yet.
    """

    kind: Literal["thinking", "content", "call_start", "arguments", "call_end"]
    text: str
    call: Call | None = None


def told(call: Call) -> list[Heard]:
    """Return the pieces of a call that is complete."""
    return [
        Heard("call_start", "", replace(call, arguments="")),
        Heard("arguments", call.arguments),
        Heard("call_end", "", call),
    ]


class Arguments:
    """A JSON object that arrives in pieces: finds its end, and escapes control characters inside
    its strings.
    """

    def __init__(self) -> None:
        self.done = False
        self._open, self._in_string, self._escaped = list[str](), False, False

    @property
    def rest(self) -> str | None:
        """The brackets that would close the object here; None inside a string."""
        return None if self._in_string else "".join(reversed(self._open))

    def take(self, text: str, over: bool = False) -> tuple[str, int]:
        """Return the piece of `text` that belongs to the object, and its length in characters."""
        out: list[str] = []
        position = 0
        while position < len(text) and not self.done:
            if self._escaped:
                out.append(text[position].translate(CONTROLS))
                self._escaped, position = False, position + 1
                continue
            match = (INSIDE if self._in_string else OUTSIDE).search(text, position)
            end = match.start() if match else len(text)
            out.append(
                text[position:end].translate(CONTROLS) if self._in_string else text[position:end]
            )
            position = end
            if match:
                position += self._step(match[0], out)
        return "".join(out), position

    def _step(self, mark: str, out: list[str]) -> int:
        """Handle a character that changes the state; return 0 if it cannot be part of JSON."""
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._in_string = not self._in_string
        elif mark in PAIRS:
            self._open.append(PAIRS[mark])
        elif self._open and mark == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        else:
            self.done = True
            return 0
        out.append(mark)
        return 1


class Calling:
    """The calls of one block: `begin` finds the first call, `feed` continues. `has_ended` is set
    once the block has ended. `string_arguments`: for each function, the arguments that are strings
    by its schema. `digits` makes the digits of call ids.
    """

    def __init__(
        self,
        family: Family,
        names: frozenset[str],
        texts: Mapping[str, frozenset[str]],
        digits: Digits,
    ) -> None:
        self.over = False
        self._family, self._names, self._texts, self._digits, self._number = (
            family,
            names,
            texts,
            digits,
            0,
        )
        self._call, self._written = Call("", ""), list[str]()
        self._arguments: Written = Arguments()

    def begin(self, text: str) -> tuple[list[Heard], str] | None:
        """Return the start of the call at the beginning of `text`, and the rest of the text, which
        holds its arguments; None if there is no call (yet).
        """
        head = self._family.head(text, self._number)
        if head is None or (self._family.first and head.call.name not in self._names):
            return None
        self._number += 1
        self._call = replace(head.call, id=head.call.id or self._family.id(self._digits()))
        texts = self._texts.get(head.call.name, frozenset())
        self._arguments, self._written = head.form.reader(texts) if head.form else Arguments(), []
        return [Heard("call_start", "", self._call)], text[head.used :]

    def feed(self, text: str, over: bool) -> tuple[list[Heard], str]:
        """Return the pieces that `text` adds, and the part of it that was not read. `is_last`: no
        more text follows.
        """
        out: list[Heard] = []
        while text or over:
            if not self._arguments.done:
                piece, used = self._arguments.take(text, over)
                text = text[used:]
                if piece:
                    self._written.append(piece)
                    out.append(Heard("arguments", piece))
                if not self._arguments.done and not over:
                    break
                self._arguments.done = True
                out.append(
                    Heard("call_end", "", replace(self._call, arguments="".join(self._written)))
                )
            if next_call := self.begin(text):
                out += next_call[0]
                text = next_call[1]
                continue
            more, text = self._end_block(text, over)
            return out + more, text
        return out, text

    def _end_block(self, text: str, over: bool) -> tuple[list[Heard], str]:
        """Find the end of the block; return the content after it and the rest of the text."""
        family = self._family
        ends = [
            (index, index + len(word)) for word in family.ends if (index := text.find(word)) >= 0
        ]
        if not family.first:  # a block without an end mark ends where the next one begins
            ends += [(index, index) for word in family.opens if (index := text.find(word)) >= 0]
        if not ends and not over:
            return [], text
        start, end = min(ends, default=(len(text), len(text)))
        self.over, content = True, text[:start]
        for word in family.closes:
            content = content.replace(word, "")
        content = ID.sub("", content).lstrip(BETWEEN)
        return [Heard("content", content)] if content else [], text[end:]


def partly(arguments: str) -> dict[str, Any]:
    """Return the complete part of a call's arguments, as Anthropic's client parses arguments that
    were cut off.
    """
    for text in _completions(arguments):
        try:
            value = strict(text)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _completions(text: str) -> Iterator[str]:
    """Yield possible completions of a text that was cut off, the longest first: closed at its end,
    before one of its commas, or after one of its opening brackets.
    """
    cuts = (
        index + (text[index] != ",")
        for index in range(len(text) - 1, -1, -1)
        if text[index] in ",{["
    )
    for end in islice(chain((len(text),), cuts), CUTS):
        scan = Arguments()
        text_of_cut = scan.take(text[:end])[0]
        if scan.rest is not None:
            yield text_of_cut + scan.rest
