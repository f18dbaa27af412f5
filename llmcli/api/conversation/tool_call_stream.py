"""Streams the tool calls of a block of calls: the name of each call, then its arguments in pieces.

Streamed pieces cannot be taken back, so a call is final as soon as its arguments begin. Arguments
that are cut off or are not JSON are returned as the model wrote them, up to that point.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from llmcli.api.tool_calls.base import ArgumentStream, MakeDigits, ToolCall, ToolCallFormat
from llmcli.strict_json import parse_strict_json

# Characters at which the parser must act: inside a string its end and escapes; outside a string
# the quotes and brackets, and every character that JSON does not allow there.
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
    """A part of an answer: thinking or content in `text`; or the start of a tool call, a part of
    its arguments in `text`, or its end. `call`: the call, without arguments at its start and with
    all arguments at its end.
    """

    kind: Literal["thinking", "content", "call_start", "arguments", "call_end"]
    text: str
    call: ToolCall | None = None


def complete_call_pieces(call: ToolCall) -> list[OutputPiece]:
    """Return the pieces of a complete call: its start, all arguments, its end."""
    return [
        OutputPiece("call_start", "", replace(call, arguments="")),
        OutputPiece("arguments", call.arguments),
        OutputPiece("call_end", "", call),
    ]


class JsonArgumentStream:
    """Reads a JSON object that arrives in pieces. It finds the object's end, and escapes control
    characters inside strings, which models write but JSON forbids.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._open, self._in_string, self._escaped = list[str](), False, False

    @property
    def closing_brackets(self) -> str | None:
        """The brackets that would close the object at the current position; None inside a
        string.
        """
        return None if self._in_string else "".join(reversed(self._open))

    def feed(self, text: str, is_last: bool = False) -> tuple[str, int]:
        """Return the beginning of `text` that belongs to the object, with control characters
        escaped, and the number of characters read from `text`.
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
        """Process a character that is outside JSON's words and numbers, or that matters inside a
        string. Return the number of characters read: 1, or 0 if the object cannot contain the
        character.
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
    """Streams the calls of one block. begin() recognizes the first call, feed() reads the text
    after that. `has_ended`: whether the block has ended.

    `string_arguments`: for each function, the arguments that its schema declares as strings.
    `make_digits`: returns the digits of a new call id.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        names: frozenset[str],
        string_arguments: Mapping[str, frozenset[str]],
        make_digits: MakeDigits,
    ) -> None:
        self.has_ended = False
        self._call_format, self._names, self._string_arguments, self._make_digits, self._n_calls = (
            call_format,
            names,
            string_arguments,
            make_digits,
            0,
        )
        self._call, self._written = ToolCall("", ""), list[str]()
        self._arguments: ArgumentStream = JsonArgumentStream()

    def begin(self, text: str) -> tuple[list[OutputPiece], str] | None:
        """Recognize the call at the beginning of `text`. Return its start piece and the text after
        the call's head, which begins with the arguments. Return None if `text` does not begin with
        the complete head of a call.
        """
        head = self._call_format.match_head(text, self._n_calls)
        if head is None or (self._call_format.starts_answer and head.call.name not in self._names):
            return None
        self._n_calls += 1
        self._call = replace(
            head.call, id=head.call.id or self._call_format.make_id(self._make_digits())
        )
        string_arguments = self._string_arguments.get(head.call.name, frozenset())
        self._arguments, self._written = (
            head.argument_format.open_stream(string_arguments)
            if head.argument_format
            else JsonArgumentStream(),
            [],
        )
        return [OutputPiece("call_start", "", self._call)], text[head.n_characters :]

    def feed(self, text: str, is_last: bool) -> tuple[list[OutputPiece], str]:
        """Return the pieces that `text` adds, and the end of `text` that was not read. `is_last`:
        no more text follows.
        """
        out: list[OutputPiece] = []
        while text or is_last:
            if not self._arguments.is_complete:
                piece, n_read = self._arguments.feed(text, is_last)
                text = text[n_read:]
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
            content_pieces, text = self._end_block(text, is_last)
            return out + content_pieces, text
        return out, text

    def _end_block(self, text: str, is_last: bool) -> tuple[list[OutputPiece], str]:
        """Look for the end of the block. Return the content before this end and the text after it;
        without an end, no content and the whole text. If no more text follows (`is_last`), the
        block ends with the text.
        """
        call_format = self._call_format
        ends = [
            (index, index + len(mark))
            for mark in call_format.block_endings
            if (index := text.find(mark)) >= 0
        ]
        if (
            not call_format.starts_answer
        ):  # a block without an end mark ends where the next one begins
            ends += [
                (index, index) for mark in call_format.openings if (index := text.find(mark)) >= 0
            ]
        if not ends and not is_last:
            return [], text
        start, end = min(ends, default=(len(text), len(text)))
        self.has_ended, content = True, text[:start]
        for mark in call_format.closings:
            content = content.replace(mark, "")
        content = CALL_ID_PATTERN.sub("", content).lstrip(SEPARATOR_CHARACTERS)
        return [OutputPiece("content", content)] if content else [], text[end:]


def parse_partial_arguments(arguments: str) -> dict[str, Any]:
    """Return the complete values of a call's arguments, which may be cut off. Anthropic's client
    does the same with a partial JSON text.
    """
    for text in _completions(arguments):
        try:
            value = parse_strict_json(text)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _completions(text: str) -> Iterator[str]:
    """Yield valid completions of a JSON text that was cut off, the longest first. Each cuts the
    text at its end, before a comma, or after an opening bracket, and closes the open brackets.
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
