"""Parses and writes large JSON texts in pieces, so that other threads can run meanwhile.

Python's parser does not let another thread run before it has reached the end of the text. A body of
8 MB with a million numbers would stop the event loop, and with it every stream, for a second. Here
the parser gets pieces of at most PIECE_CHARACTERS; between two of them, the interpreter switches to
a thread that waits.

A value is parsed by Python's own parser if it ends inside a piece. Only a list, an object or a text
that is longer is taken apart here. The result, and the errors, are those of parse_strict_json().
Writing is divided in the same way.
"""

import codecs
import json
import json.decoder
import re
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from typing import Any

from llmcli.api.forms.base import encode_json
from llmcli.strict_json import parse_finite_float

PIECE_CHARACTERS = 1 << 15  # parsed within about a millisecond
SHORT_CHARACTERS = 256  # a value is first looked for in this many characters
MAX_FAILURES = 3  # of parsing many entries of a list at once, before they are parsed one by one
PIECE_VALUES = 1024  # values of a list that are written at once
MAX_DEPTH = 200  # of lists and objects that are longer than a piece
# Freeing the result, and the garbage collector, also stop all other threads. No request needs more.
MAX_VALUES, MAX_CONTAINERS = 1 << 20, 100_000
DELIMITERS = frozenset(" \t\n\r,:]}")  # characters after a value
WHITESPACE = re.compile(r"[ \t\n\r]*")
# Characters of a text, up to its end or an escape that is not complete in the piece. The halves of a
# surrogate pair stay together; the last line is a first half without a second one.
TEXT_RUN = re.compile(
    r"""[^"\\]*(?:\\(?:[^u]
        |u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
        |u(?![dD][89abAB])[0-9a-fA-F]{4}
        |u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])
    )[^"\\]*)*""",
    re.DOTALL | re.VERBOSE,
)
# By the first character of a list's entry: the end of such an entry before the next one.
ENTRY_ENDS = {"{": "},", "[": "],", '"': '",'}


# Python's own parsers of one value and of one text; they take a text and an offset
scanstring: Callable[[str, int, bool], tuple[str, int]] = json.decoder.scanstring  # type: ignore[attr-defined]


class TooManyValues(ValueError):
    """The text has more values than any request needs."""


def parse_in_pieces(raw: bytes) -> Any:
    """Return the value of a JSON text, as parse_strict_json() does. Call this on a worker thread.

    Raises ValueError for an invalid text (UnicodeDecodeError for one that is not UTF-8),
    TooManyValues, and RecursionError if the text is nested too deeply.
    """
    text = _decode(raw)
    parser = _PieceParser(text)
    value, end = parser.value(parser.skip_whitespace(0), 0)
    if (end := parser.skip_whitespace(end)) != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


def encode_in_pieces(value: Any) -> bytes:
    """Return a value as JSON, as encode_json() does. Call this on a worker thread."""
    return b"".join(_encoded_pieces(value))


def _encoded_pieces(value: Any) -> Iterator[bytes]:
    """Yield the parts of a value's JSON. None of them takes long."""
    separator = b""
    if isinstance(value, dict):
        yield b"{"
        for name, entry in value.items():
            yield separator + encode_json(str(name)) + b":"
            yield from _encoded_pieces(entry)
            separator = b","
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        for start in range(0, len(value), PIECE_VALUES):
            entries = value[start : start + PIECE_VALUES]
            if any(isinstance(entry, dict | list) for entry in entries):
                for entry in entries:
                    yield separator
                    yield from _encoded_pieces(entry)
                    separator = b","
            else:
                yield separator + encode_json(entries)[1:-1]
                separator = b","
        yield b"]"
    else:
        yield encode_json(value)


def _refuse_constant(word: str) -> None:
    """Raise ValueError for NaN, Infinity or -Infinity."""
    raise ValueError(f"{word} is no number of JSON")


def _decode(raw: bytes) -> str:
    """Return the text of the bytes, whose encoding is found as json.loads() does."""
    encoding = json.detect_encoding(raw)
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    step = PIECE_CHARACTERS
    try:
        pieces = [decoder.decode(raw[at : at + step]) for at in range(0, len(raw), step)]
        return "".join([*pieces, decoder.decode(b"", final=True)])
    except UnicodeDecodeError:
        return raw.decode(encoding, "surrogatepass")  # raises, with the position in the whole text


class _PieceParser:
    """Parses one text. All methods take and return offsets into it."""

    def __init__(self, text: str) -> None:
        self.text = text
        decoder: Any = json.JSONDecoder(
            parse_constant=_refuse_constant, parse_float=parse_finite_float
        )
        self._scan: Callable[[str, int], tuple[Any, int]] = decoder.scan_once
        n_openings = text.count("{") + text.count("[")
        # A text may contain brackets and commas without being structure, so values are counted only
        # if there may be too many.
        self._counts = n_openings > MAX_CONTAINERS or n_openings + text.count(",") > MAX_VALUES
        self._n_values = self._n_containers = 0

    def skip_whitespace(self, at: int) -> int:
        """Return the offset of the next character that is no whitespace."""
        match = WHITESPACE.match(self.text, at)
        assert match is not None
        return match.end()

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """Return the value that begins at `at`, and its end. `depth`: how many lists and objects
        that are longer than a piece contain it.
        """
        if depth > MAX_DEPTH:
            raise RecursionError("nested too deeply")
        if (short := self._short_value(at)) is not None:
            self._count(short[0])
            return short
        match self.text[at : at + 1]:
            case "[":
                self._count([])
                return self._list(at + 1, depth)
            case "{":
                self._count([])
                return self._object(at + 1, depth)
            case '"':
                return self._long_text(at)
        try:
            return self._scan(self.text, at)
        except StopIteration as stop:
            raise JSONDecodeError("Expecting value", self.text, stop.value) from None

    def _short_value(self, at: int) -> tuple[Any, int] | None:
        """Return the value that begins at `at`, and its end, if it ends inside a piece."""
        for size in (SHORT_CHARACTERS, PIECE_CHARACTERS):
            piece = self.text[at : at + size]
            try:
                value, end = self._scan(piece, 0)
            except (StopIteration, JSONDecodeError):
                continue  # it is longer or wrong
            # a number may go on after the piece
            if piece[end : end + 1] in DELIMITERS or at + end == len(self.text):
                return value, at + end
        return None

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        """Return the list whose first entry begins at `at`, and its end."""
        values: list[Any] = []
        n_failures, at = 0, self.skip_whitespace(at)
        if self.text[at : at + 1] == "]":
            return values, at + 1
        while True:
            if n_failures < MAX_FAILURES:
                entries = self._many_entries(at, ENTRY_ENDS.get(self.text[at : at + 1], ","), "[]")
                n_failures += entries is None
                if entries:
                    values += entries[0]
                    at = self.skip_whitespace(entries[1])
            value, at = self.value(at, depth + 1)
            values.append(value)
            at, is_end = self._after_entry(at, "]")
            if is_end:
                return values, at

    def _many_entries(self, at: int, ending: str, brackets: str) -> tuple[Any, int] | None:
        """Return the entries of a list or an object from `at` on, as many as seem to end inside a
        piece, and the offset after the comma behind them. Return None if the last one does not end
        there. `ending`: what is expected at the end of an entry, with the comma.
        """
        piece = self.text[at : at + PIECE_CHARACTERS]
        end = piece.rfind(ending)
        if end < 0:
            return None
        end += ending.index(",")
        try:
            values, stop = self._scan(f"{brackets[0]}{piece[:end]}{brackets[1]}", 0)
        except (StopIteration, JSONDecodeError):
            return None
        if stop != end + 2 or not values:
            return None
        self._count(values)
        return values, at + end + 1

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        """Return the object whose first name begins at `at`, and its end."""
        values: dict[str, Any] = {}
        text, at, n_failures = self.text, self.skip_whitespace(at), 0
        if text[at : at + 1] == "}":
            return values, at + 1
        while True:
            if n_failures < MAX_FAILURES:
                members = self._many_entries(at, ',"', "{}")
                n_failures += members is None
                if members:
                    values |= members[0]
                    at = self.skip_whitespace(members[1])
            if text[at : at + 1] != '"':
                message = "Expecting property name enclosed in double quotes"
                raise JSONDecodeError(message, text, at)
            name, at = self.value(at, depth + 1)
            at = self.skip_whitespace(at)
            if text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", text, at)
            values[name], at = self.value(self.skip_whitespace(at + 1), depth + 1)
            at, is_end = self._after_entry(at, "}")
            if is_end:
                return values, at

    def _after_entry(self, at: int, closing: str) -> tuple[int, bool]:
        """Return the offset after an entry of a list or an object: that of the next entry, or the
        end, and whether it is the end.
        """
        at = self.skip_whitespace(at)
        character = self.text[at : at + 1]
        if character == closing:
            return at + 1, True
        if character != ",":
            raise JSONDecodeError("Expecting ',' delimiter", self.text, at)
        return self.skip_whitespace(at + 1), False

    def _long_text(self, start: int) -> tuple[str, int]:
        """Return the text whose opening quote is at `start`, and the offset after its end."""
        text, parts, at = self.text, list[str](), start + 1
        while True:
            run = TEXT_RUN.match(text, at, at + PIECE_CHARACTERS)
            assert run is not None
            end, is_end = run.end(), text[run.end() : run.end() + 1] == '"'
            if end == at and not is_end:
                scanstring(text, start + 1, True)  # raises: the text does not end, or is wrong here
                raise AssertionError("a text that the parser accepts")
            try:
                part, _ = scanstring(f'{text[at:end]}"', 0, True)
            except JSONDecodeError as error:
                raise JSONDecodeError(error.msg, text, at + error.pos) from None
            parts.append(part)
            if is_end:
                return "".join(parts), end + 1
            at = end

    def _count(self, value: Any) -> None:
        """Count a value with all values in it. Raises TooManyValues."""
        if not self._counts:
            return
        self._n_values += 1
        remaining = [value]
        while remaining:
            item = remaining.pop()
            if isinstance(item, dict | list):
                self._n_containers += 1
                self._n_values += len(item)
                inner = item.values() if isinstance(item, dict) else item
                remaining += [entry for entry in inner if isinstance(entry, dict | list)]
            if self._n_values > MAX_VALUES or self._n_containers > MAX_CONTAINERS:
                raise TooManyValues(
                    f"it has more than {MAX_VALUES:,} values, or {MAX_CONTAINERS:,} lists and objects"
                )
