"""Writes values as text in chat templates: as JSON (the filter `tojson`), and as Python does where
a template writes a list or dictionary itself. The texts in the values keep their sources.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from llmcli.runtime.text.tracked_text import (
    UNKNOWN_SOURCE,
    ClientDict,
    ClientList,
    TrackedText,
    attribute_all,
    join_texts,
    quoted,
)

MAX_INDENT = 8  # spaces of a level of JSON

Charge = Callable[[int], None]  # charges characters before they are built


@dataclass(frozen=True, slots=True)
class JsonLayout:
    """The layout of JSON: the arguments of json.dumps(). `indent`: None for a single line."""

    ensure_ascii: bool = False
    indent: str | None = None
    item_separator: str = ", "
    key_separator: str = ": "
    sort_keys: bool = False

    def dump(self, value: Any) -> str:
        """Return a value as JSON, without the sources of its texts."""
        return json.dumps(
            value,
            ensure_ascii=self.ensure_ascii,
            indent=self.indent,
            separators=(self.item_separator, self.key_separator),
            sort_keys=self.sort_keys,
        )


def json_layout(
    ensure_ascii: bool, indent: int | str | None, separators: Any, sort_keys: bool
) -> JsonLayout:
    """Return the layout for arguments of json.dumps(). Indentation is limited to MAX_INDENT."""
    if isinstance(indent, int):
        indent = " " * min(indent, MAX_INDENT)
    item_separator, key_separator = separators or (", " if indent is None else ",", ": ")
    return JsonLayout(
        ensure_ascii,
        None if indent is None else indent[:MAX_INDENT],
        item_separator,
        key_separator,
        sort_keys,
    )


def write_json(value: Any, layout: JsonLayout, charge: Charge) -> str:
    """Return a value as JSON, as json.dumps() does. Filters of Jinja return generators, which are
    written as lists. Raises TypeError for a value that is none of JSON's.
    """
    pieces = list[str]()
    for piece in _json_pieces(value, layout, "\n"):
        charge(len(piece))
        pieces.append(piece)
    return join_texts(pieces)


def _json_pieces(value: Any, layout: JsonLayout, newline: str) -> Iterator[str]:
    """Yield the pieces of a value's JSON. `newline`: a newline and the present indentation."""
    if isinstance(value, str):
        yield _json_string(value, layout)
    elif (
        isinstance(value, (ClientDict, ClientList))
        and value.source is not None
        and "\n" not in layout.item_separator + layout.key_separator
    ):
        # much faster than to write each text; the punctuation gets the source of the texts, too
        text = layout.dump(value)
        yield TrackedText.from_source(text.replace("\n", newline), value.source)
    elif value is None or isinstance(value, (bool, int, float)):
        yield json.dumps(value)
    elif isinstance(value, dict):
        items = sorted(value.items()) if layout.sort_keys else value.items()
        entries = (
            (join_texts([_json_key(key, layout), layout.key_separator]), item)
            for key, item in items
        )
        yield from _bracketed("{}", entries, layout, newline)
    elif isinstance(value, (list, tuple, Iterator)):
        yield from _bracketed("[]", (("", item) for item in value), layout, newline)
    else:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _bracketed(
    brackets: str, entries: Iterable[tuple[str, Any]], layout: JsonLayout, newline: str
) -> Iterator[str]:
    """Yield the pieces of an object or array. `entries`: the text before each value, the value."""
    deeper = newline if layout.indent is None else newline + layout.indent
    is_empty = True
    for before, item in entries:
        separator = brackets[0] if is_empty else layout.item_separator
        yield separator if layout.indent is None else separator + deeper
        if before:
            yield before
        yield from _json_pieces(item, layout, deeper)
        is_empty = False
    if is_empty:
        yield brackets
    else:
        yield brackets[1] if layout.indent is None else newline + brackets[1]


def _json_key(key: Any, layout: JsonLayout) -> str:
    if isinstance(key, str):
        return _json_string(key, layout)
    if key is None or isinstance(key, (bool, int, float)):
        return f'"{json.dumps(key)}"'
    raise TypeError(f"keys must be str, int, float, bool or None, not {type(key).__name__}")


def _json_string(text: str, layout: JsonLayout) -> str:
    def escape(plain: str) -> str:
        return json.dumps(plain, ensure_ascii=layout.ensure_ascii)[1:-1]

    inner = text.converted(escape) if isinstance(text, TrackedText) else escape(text)
    return join_texts(['"', inner, '"'])


def write_text(value: Any) -> str:
    """Return str(value), as a template writes a value. The characters of texts in a list or
    dictionary get the sources that `quoted` returns for theirs. The text of any other object, which
    may contain texts from outside, counts as unknown.
    """
    if isinstance(value, str):
        return value
    if _is_scalar(value):
        return str(value)
    if isinstance(value, (ClientDict, ClientList)) and value.source is not None:
        return TrackedText.from_source(str(value), quoted(value.source))
    if isinstance(value, (dict, list, tuple)):
        return join_texts(list(_python_pieces(value)))
    return TrackedText.from_source(str(value), UNKNOWN_SOURCE)


def _is_scalar(value: Any) -> bool:
    from jinja2 import Undefined

    return value is None or isinstance(value, (bool, int, float, Undefined))


def _python_pieces(value: Any) -> Iterator[str]:
    """Yield the pieces of repr(value)."""
    if isinstance(value, TrackedText):
        sources = [quoted(source) for source in value.sources]
        yield attribute_all(repr(value.plain), sources)
    elif isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _python_pieces(key)
            yield ": "
            yield from _python_pieces(item)
        yield "}"
    elif isinstance(value, (list, tuple)):
        is_list = isinstance(value, list)
        yield "[" if is_list else "("
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _python_pieces(item)
        yield "]" if is_list else ",)" if len(value) == 1 else ")"
    elif isinstance(value, str) or _is_scalar(value):
        yield repr(value)
    else:
        yield TrackedText.from_source(repr(value), UNKNOWN_SOURCE)
