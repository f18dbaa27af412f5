"""Reads values out of an untrusted JSON document: checks each one's kind, and names its path in
every complaint.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.serve.problems import Problem

KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    return next((words for one, words in KINDS.items() if type(value) is one), type(value).__name__)


@dataclass(frozen=True, slots=True)
class Fields:
    """An object in the document; `path` says where it stands. null counts as missing, everywhere."""

    values: Mapping[str, Any]
    path: str = ""

    def at(self, name: str | int) -> str:
        """The path of a field."""
        if isinstance(name, int):
            return f"{self.path}[{name}]"
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, must: str) -> Problem:
        """The field is not what it must be."""
        value = self.values.get(name)
        shown = repr(value)[:60] if isinstance(value, str | int | float) else kind(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        where = self.at(name)
        return Problem(f"{where} must be {must}, not {shown}", param=where)

    def has(self, name: str) -> bool:
        """Whether the field says something."""
        return self.values.get(name) is not None

    def _typed(self, name: str, wanted: type, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise self.wrong(name, KINDS[wanted])
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Text, or `default`."""
        found: str | None = self._typed(name, str, default)
        return found

    def needed(self, name: str) -> str:
        """Text that must be there."""
        found = self.text(name)
        if found is None:
            raise Problem(f"{self.at(name)} is missing", param=self.at(name))
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        return bool(self._typed(name, bool, default))

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """A whole number between two, both included."""
        value = self._typed(name, int, None)
        if value is None:
            return default
        if not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number."""
        value = self._typed(name, float, default)
        return None if value is None else float(value)

    def choice(self, name: str, known: tuple[str, ...], default: str) -> str:
        """One of a few words."""
        value = self.text(name, default)
        if value not in known:
            raise self.wrong(name, f"one of {', '.join(known)}")
        return value or default

    def table(self, name: str) -> "Fields | None":
        """An object within."""
        value = self._typed(name, dict, None)
        return None if value is None else Fields(value, self.at(name))

    def list(self, name: str, most: int = 1 << 20) -> list[Any]:
        """A list; empty where there is none."""
        value: list[Any] = self._typed(name, list, [])
        if len(value) > most:
            raise self._many(name, len(value), most)
        return value

    def tables(self, name: str, most: int = 1 << 20) -> "Iterator[Fields]":
        """The objects of a list."""
        inner = Fields({}, self.at(name))
        for index, value in enumerate(self.list(name, most)):
            if type(value) is not dict:
                where = inner.at(index)
                raise Problem(f"{where} must be an object, not {kind(value)}", param=where)
            yield Fields(value, inner.at(index))

    def words(self, name: str, most: int) -> tuple[str, ...]:
        """A text or a list of them."""
        value = self.values.get(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.wrong(name, "text or a list of texts")
        if len(found) > most:
            raise self._many(name, len(found), most)
        return tuple(found)

    def _many(self, name: str, count: int, most: int) -> Problem:
        return Problem(
            f"{self.at(name)} has {count:,} entries, at most {most:,} are taken",
            param=self.at(name),
        )
