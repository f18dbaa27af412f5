"""Streams the tool calls of one block: each call's name, then its arguments in pieces.

As soon as a call's arguments begin, the call is certain, because streamed pieces cannot be taken
back. The arguments are sent as the model wrote them. If they are cut off or are not JSON, they end
at that point, in a complete document as in a stream.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from llmcli.api.tool_calls.base import ArgumentStream, MakeDigits, ToolCall, ToolCallFormat
from llmcli.strict_json import parse_strict_json

# Characters that change the parser's state inside and outside of a string. Outside of strings, JSON
# has only these characters, words and numbers.
IN_STRING_PATTERN, BETWEEN_STRINGS_PATTERN = (
    re.compile(r'["\\]'),
    re.compile(r'["{}\[\]]|[^\s\w.,:+-]'),
)
CONTROL_ESCAPES = {code: f"\\u{code:04x}" for code in range(32)} | {9: "\\t", 10: "\\n", 13: "\\r"}
CLOSING_BRACKETS = {"{": "}", "[": "]"}
MAX_COMPLETIONS = 256  # attempts to complete a text that was cut off
SEPARATOR_CHARACTERS = " \t\r\n}],;`"
# Mistral's models write the id after the arguments
CALL_ID_PATTERN = re.compile(r',\s*"id"\s*:\s*"[^"]*"')


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of an answer: thinking, content, the start of a call, a piece of its arguments, or
    its end. The `call` of a start piece has no arguments yet.
    """

    kind: Literal["thinking", "content", "call_start", "arguments", "call_end"]
    text: str
    call: ToolCall | None = None


def complete_call_pieces(call: ToolCall) -> list[OutputPiece]:
    """Return all pieces of a complete call."""
    return [
        OutputPiece("call_start", "", replace(call, arguments="")),
        OutputPiece("arguments", call.arguments),
        OutputPiece("call_end", "", call),
    ]


class JsonArgumentStream:
    """Reads a JSON object that arrives in pieces. It finds the object's end and escapes control
    characters inside its strings.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._open, self._in_string, self._escaped = list[str](), False, False

    @property
    def closing_brackets(self) -> str | None:
        """The brackets that would close the object at the current position; None inside a string."""
        return None if self._in_string else "".join(reversed(self._open))

    def feed(self, text: str, is_last: bool = False) -> tuple[str, int]:
        """Return the part of `text` that belongs to the object, with escapes, and the number of
        characters read.
        """
        out: list[str] = []
        position = 0
        while position < len(text) and not self.is_complete:
            if self._escaped:
                out.append(text[position].translate(CONTROL_ESCAPES))
                self._escaped, position = False, position + 1
                continue
            match = (IN_STRING_PATTERN if self._in_string else BETWEEN_STRINGS_PATTERN).search(
                text, position
            )
            end = match.start() if match else len(text)
            out.append(
                text[position:end].translate(CONTROL_ESCAPES)
                if self._in_string
                else text[position:end]
            )
            position = end
            if match:
                position += self._step(match[0], out)
        return "".join(out), position

    def _step(self, mark: str, out: list[str]) -> int:
        """Process a character that changes the state. Return the number of characters read: 1, or 0
        if the character cannot be part of the object.
        """
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._in_string = not self._in_string
        elif mark in CLOSING_BRACKETS:
            self._open.append(CLOSING_BRACKETS[mark])
        elif self._open and mark == self._open[-1]:
            self._open.pop()
            self.is_complete = not self._open
        else:
            self.is_complete = True
            return 0
        out.append(mark)
        return 1


class ToolCallStream:
    """The calls of one block. `begin` finds the first call, `feed` reads the following text.
    `has_ended` is true once the block has ended.

    `string_arguments`: for each function, the arguments that are strings by its schema. `digits`:
    returns the digits of a new call id.
    """

    def __init__(
        self,
        family: ToolCallFormat,
        names: frozenset[str],
        string_arguments: Mapping[str, frozenset[str]],
        digits: MakeDigits,
    ) -> None:
        self.has_ended = False
        self._family, self._names, self._texts, self._digits, self._number = (
            family,
            names,
            string_arguments,
            digits,
            0,
        )
        self._call, self._written = ToolCall("", ""), list[str]()
        self._arguments: ArgumentStream = JsonArgumentStream()

    def begin(self, text: str) -> tuple[list[OutputPiece], str] | None:
        """Return the start piece of the call at the beginning of `text`, and the remaining text,
        which begins with the call's arguments. Return None if `text` does not begin with a call, or
        if the call's head is incomplete.
        """
        head = self._family.match_head(text, self._number)
        if head is None or (self._family.starts_answer and head.call.name not in self._names):
            return None
        self._number += 1
        self._call = replace(head.call, id=head.call.id or self._family.make_id(self._digits()))
        texts = self._texts.get(head.call.name, frozenset())
        self._arguments, self._written = (
            head.argument_format.open_stream(texts)
            if head.argument_format
            else JsonArgumentStream(),
            [],
        )
        return [OutputPiece("call_start", "", self._call)], text[head.n_characters :]

    def feed(self, text: str, is_last: bool) -> tuple[list[OutputPiece], str]:
        """Return the pieces that `text` adds, and the unread part of `text`. `is_last`: no more
        text follows.
        """
        out: list[OutputPiece] = []
        while text or is_last:
            if not self._arguments.is_complete:
                piece, used = self._arguments.feed(text, is_last)
                text = text[used:]
                if piece:
                    self._written.append(piece)
                    out.append(OutputPiece("arguments", piece))
                if not self._arguments.is_complete and not is_last:
                    break
                self._arguments.is_complete = True
                out.append(
                    OutputPiece(
                        "call_end", "", replace(self._call, arguments="".join(self._written))
                    )
                )
            if next_call := self.begin(text):
                out += next_call[0]
                text = next_call[1]
                continue
            more, text = self._end_block(text, is_last)
            return out + more, text
        return out, text

    def _end_block(self, text: str, over: bool) -> tuple[list[OutputPiece], str]:
        """Look for the end of the block. Return the content before that end and the text after it;
        without an end, no content and the whole text. `over`: no more text follows, so the block
        ends with the text.
        """
        family = self._family
        ends = [
            (index, index + len(word))
            for word in family.block_endings
            if (index := text.find(word)) >= 0
        ]
        if not family.starts_answer:  # a block without an end mark ends where the next one begins
            ends += [(index, index) for word in family.openings if (index := text.find(word)) >= 0]
        if not ends and not over:
            return [], text
        start, end = min(ends, default=(len(text), len(text)))
        self.has_ended, content = True, text[:start]
        for word in family.closings:
            content = content.replace(word, "")
        content = CALL_ID_PATTERN.sub("", content).lstrip(SEPARATOR_CHARACTERS)
        return [OutputPiece("content", content)] if content else [], text[end:]


def parse_partial_arguments(arguments: str) -> dict[str, Any]:
    """Return the part of a call's arguments that is complete, as Anthropic's client does for
    arguments that were cut off.
    """
    for text in _completions(arguments):
        try:
            value = parse_strict_json(text)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _completions(text: str) -> Iterator[str]:
    """Yield possible completions of a text that was cut off, the longest first. Each closes the
    open brackets at the end of the text, before one of its commas, or after one of its opening
    brackets.
    """
    cuts = (
        index + (text[index] != ",")
        for index in range(len(text) - 1, -1, -1)
        if text[index] in ",{["
    )
    for end in islice(chain((len(text),), cuts), MAX_COMPLETIONS):
        scan = JsonArgumentStream()
        text_of_cut = scan.feed(text[:end])[0]
        if scan.closing_brackets is not None:
            yield text_of_cut + scan.closing_brackets
