"""TrackedText: a text that records which of its characters come from outside a chat template.

A template joins its own words with the texts of a conversation. The result must record which is
which: only the template's own words may become control tokens, and a text that is not in the result
has been lost. All operations of a template that return text therefore return a TrackedText whenever
one of their inputs is one. Where an operation moves characters in an unknown way, all characters of
its result count as text from outside.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, SupportsIndex

UNKNOWN_SOURCE = -1
MAX_MATCHES = 10_000  # of replace() in a text with spans; more are not followed


# the characters `start` to `end` of a text, and the number of the source that they come from
Span = tuple[int, int, int]


def _end_of(span: Span) -> int:
    return span[1]


def quoted(source: int) -> int:
    """Return the source of characters that a template has written as a Python value, for example as
    `{'city': 'Rome'}` instead of JSON. quoted(quoted(source)) is `source`.
    """
    return -2 - source


class TrackedText(str):
    """A text with the spans that come from outside the template, in order and without overlaps."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: Iterable[Span] = ()) -> Self:
        self = super().__new__(cls, text)
        self.spans = tuple(spans)
        return self

    @classmethod
    def from_source(cls, text: str, source: int) -> Self:
        """Return a text whose characters all come from `source`."""
        return cls(text, ((0, len(text), source),) if text else ())

    @property
    def only_source(self) -> int | None:
        """The source of all characters of the text; None if they have several, or none."""
        if len(self.spans) != 1:
            return None
        start, end, source = self.spans[0]
        return source if end - start == len(self) else None

    @property
    def plain(self) -> str:
        """The text as an ordinary string."""
        return str.__str__(self)

    @property
    def sources(self) -> list[int]:
        """The sources of the spans, each once, in the order of the text."""
        return list(dict.fromkeys(source for _, _, source in self.spans))

    def cut(self, start: int, end: int) -> "TrackedText":
        """Return the characters `start` to `end`, with 0 <= start <= end <= len(self)."""
        if start >= end:
            return TrackedText("")
        text = str.__getitem__(self, slice(start, end))
        source = self.only_source
        if source is not None:
            return TrackedText(text, ((0, end - start, source),))
        first = bisect_right(self.spans, start, key=_end_of)
        spans = itertools.takewhile(lambda span: span[0] < end, self.spans[first:])
        return TrackedText(
            text, [(max(a, start) - start, min(b, end) - start, s) for a, b, s in spans]
        )

    def converted(self, convert: Callable[[str], str]) -> "TrackedText":
        """Return `convert(text)` for a conversion of single characters, such as lower()."""
        result = convert(self.plain)
        if len(result) == len(self):
            return TrackedText(result, self.spans)
        joined = join_texts([_convert_piece(piece, convert) for piece in self.pieces()])
        if isinstance(joined, TrackedText) and joined.plain == result:
            return joined
        return attribute_all(result, self.sources)

    def pieces(self) -> Iterator["TrackedText"]:
        """Yield the parts of the text that have a single source, or none."""
        position = 0
        for start, end, _ in self.spans:
            if start > position:
                yield self.cut(position, start)
            yield self.cut(start, end)
            position = end
        if position < len(self):
            yield self.cut(position, len(self))

    def __str__(self) -> Self:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> "TrackedText":
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            if step == 1:
                return self.cut(start, max(start, end))
            return attribute_all(str.__getitem__(self, key), self.sources)
        index = range(len(self))[key]
        return self.cut(index, index + 1)

    def __iter__(self) -> Iterator["TrackedText"]:
        return (self.cut(index, index + 1) for index in range(len(self)))

    def __add__(self, other: str) -> str:
        return join_texts([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join_texts([other, self]) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return join_texts([self] * count.__index__())

    __rmul__ = __mul__

    def strip(self, chars: str | None = None) -> "TrackedText":
        start = len(self) - len(str.lstrip(self, chars))
        return self.cut(start, max(start, len(str.rstrip(self, chars))))

    def lstrip(self, chars: str | None = None) -> "TrackedText":
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> "TrackedText":
        return self.cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> "TrackedText":
        return self.cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str) -> "TrackedText":
        return self.cut(0, len(self) - (len(suffix) if self.endswith(suffix) else 0))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(str.splitlines(self, keepends))

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._divided(sep, self.find(sep), (self, "", ""))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._divided(sep, self.rfind(sep), ("", "", self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        """Replace as in str. New characters in place of characters from outside are of the same
        source as these, unless `new` has its own sources.
        """
        result = str.replace(self, old, new, count)
        new_sources = new.sources if isinstance(new, TrackedText) else []
        if not new_sources and self.only_source is not None:
            return TrackedText.from_source(result, self.only_source)
        limit = count.__index__()
        n_matches = self.count(old) if limit < 0 else min(limit, self.count(old))
        if not n_matches:
            return self
        if not old or n_matches > MAX_MATCHES:
            return attribute_all(result, [*self.sources, *new_sources])
        pieces, position = list[str](), 0
        for _ in range(n_matches):
            at = self.find(old, position)
            replaced = self.cut(at, at + len(old)).sources
            inserted = (
                TrackedText.from_source(new, replaced[0]) if replaced and not new_sources else new
            )
            pieces += [self.cut(position, at), inserted]
            position = at + len(old)
        return join_texts([*pieces, self.cut(position, len(self))])

    def join(self, items: Iterable[str]) -> str:
        return join_texts(list(items), self)

    def center(self, width: SupportsIndex, fillchar: str = " ") -> "TrackedText":
        return self._padded(str.center(self, width, fillchar))

    def ljust(self, width: SupportsIndex, fillchar: str = " ") -> "TrackedText":
        return self._padded(str.ljust(self, width, fillchar))

    def rjust(self, width: SupportsIndex, fillchar: str = " ") -> "TrackedText":
        return self._padded(str.rjust(self, width, fillchar))

    def zfill(self, width: SupportsIndex) -> "TrackedText":
        return attribute_all(str.zfill(self, width), self.sources)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> "TrackedText":
        return self.converted(lambda text: text.expandtabs(tabsize))

    def capitalize(self) -> "TrackedText":
        return self.converted(str.capitalize)

    def casefold(self) -> "TrackedText":
        return self.converted(str.casefold)

    def lower(self) -> "TrackedText":
        return self.converted(str.lower)

    def swapcase(self) -> "TrackedText":
        return self.converted(str.swapcase)

    def title(self) -> "TrackedText":
        return self.converted(str.title)

    def upper(self) -> "TrackedText":
        return self.converted(str.upper)

    def _located(self, pieces: list[str], n_between: int = 0) -> list[str]:
        """Return parts of this text with their spans. The parts are in order. `n_between`: the
        number of characters between two of them; 0 if it is not known, and parts begin with other
        characters than those between them.
        """
        located, position = list[str](), 0
        for piece in pieces:
            start = position if n_between else self.find(piece, position)
            end = start + len(piece)
            located.append(self.cut(start, end))
            position = end + n_between
        return located

    def _divided(self, sep: str, at: int, otherwise: tuple[str, str, str]) -> tuple[str, str, str]:
        if not sep or at < 0:
            str.partition(self, sep)  # raises ValueError for an empty separator
            return otherwise
        end = at + len(sep)
        return self.cut(0, at), self.cut(at, end), self.cut(end, len(self))

    def _padded(self, result: str) -> "TrackedText":
        start = result.find(self)
        return TrackedText(result, [(start + a, start + b, source) for a, b, source in self.spans])


def from_outside(text: str) -> TrackedText:
    """Return a text as one from outside the template. A text that is tracked stays as it is."""
    return text if isinstance(text, TrackedText) else TrackedText.from_source(text, UNKNOWN_SOURCE)


def track(text: str) -> TrackedText:
    """Return a text with the methods of TrackedText."""
    return text if isinstance(text, TrackedText) else TrackedText(text)


def _convert_piece(piece: TrackedText, convert: Callable[[str], str]) -> str:
    """Return a converted text of a single source, or of none."""
    result = convert(piece.plain)
    return TrackedText.from_source(result, piece.spans[0][2]) if piece.spans else result


def attribute_all(text: str, sources: Sequence[int]) -> TrackedText:
    """Return a text of which only the sources are known, but not where they are: all characters
    come from one of `sources`, and every source has some characters if there are enough.
    """
    if not text or not sources:
        return TrackedText(text)
    starts = [min(number, len(text)) for number in range(len(sources))]
    ends = [*starts[1:], len(text)]
    spans = zip(starts, ends, sources, strict=True)
    return TrackedText(text, [span for span in spans if span[0] < span[1]])


def join_texts(texts: Sequence[str], separator: str = "") -> str:
    """Join texts as str.join does. The result is a TrackedText if any of the texts is one.

    Raises TypeError if an item is not a text.
    """
    plain = str.join(separator, texts)
    if type(separator) is str and set(map(type, texts)) <= {str}:
        return plain
    spans, position = list[Span](), 0
    for number, text in enumerate(texts):
        for part in (separator, text) if number and separator else (text,):
            for start, end, source in () if type(part) is str else _spans(part):
                if spans and spans[-1][1] == position + start and spans[-1][2] == source:
                    spans[-1] = (spans[-1][0], position + end, source)
                else:
                    spans.append((position + start, position + end, source))
            position += len(part)
    return TrackedText(plain, spans)


def _spans(text: str) -> tuple[Span, ...]:
    """Return the spans of a text. A Markup was escaped by Jinja, which loses them: it counts as
    text from outside.
    """
    if isinstance(text, TrackedText):
        return text.spans
    return ((0, len(text), UNKNOWN_SOURCE),) if text and hasattr(text, "__html__") else ()


class ClientList(list[Any]):
    """A list of the client's, which a template must not change. `source`: the only source of its
    texts; None if they may have several.
    """

    source: int | None = None


class ClientDict(dict[Any, Any]):
    """An object of the client's. `source`: the only source of its texts."""

    source: int


def track_value(value: Any, source: int) -> Any:
    """Return a copy of a JSON value whose texts, also the keys of its objects, come from
    `source`.
    """
    if isinstance(value, str):
        return TrackedText.from_source(value, source)
    if isinstance(value, dict):
        tracked = ClientDict(
            (track_value(key, source), track_value(item, source)) for key, item in value.items()
        )
        tracked.source = source
        return tracked
    if isinstance(value, (list, tuple)):
        items = ClientList(track_value(item, source) for item in value)
        items.source = source
        return items
    return value


def sources_in(value: Any) -> list[int]:
    """Return the sources of all texts in a value, which may be nested."""
    found, stack = dict[int, None](), [value]
    while stack:
        entry = stack.pop()
        if isinstance(entry, TrackedText):
            found |= dict.fromkeys(entry.sources)
        elif isinstance(entry, dict):
            stack += [*entry.values(), *entry.keys()]
        elif isinstance(entry, (list, tuple)):
            stack += entry
    return list(found)
