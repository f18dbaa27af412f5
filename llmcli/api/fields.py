"""Typed reads of an untrusted JSON document; every error names the path of the field."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.api.errors import ApiError

TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def json_type(value: object) -> str:
    """Return the kind of a JSON value in words."""
    if value is None:
        return "null"
    return next(
        (words for type_, words in TYPE_NAMES.items() if type(value) is type_), type(value).__name__
    )


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of the document; `path` is its place in the document. A null counts as missing
    everywhere.
    """

    values: Mapping[str, Any]
    path: str = ""

    def path_of(self, name: str | int) -> str:
        """Return the path of a field."""
        if isinstance(name, int):
            return f"{self.path}[{name}]"
        return f"{self.path}.{name}" if self.path else name

    def type_error(self, name: str, expected: str) -> ApiError:
        """Return the error of a field whose value is not what it must be."""
        value = self.values.get(name)
        shown = repr(value)[:60] if isinstance(value, str | int | float) else json_type(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        path = self.path_of(name)
        return ApiError(f"{path} must be {expected}, not {shown}", param=path)

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(name) is not None

    def _typed(self, name: str, type_: type, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not type_ and not (type_ is float and type(value) is int):
            raise self.type_error(name, TYPE_NAMES[type_])
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text, or `default`."""
        value: str | None = self._typed(name, str, default)
        return value

    def required_text(self, name: str) -> str:
        """Return a text. Raises ApiError if it is missing."""
        value = self.text(name)
        if value is None:
            raise ApiError(f"{self.path_of(name)} is missing", param=self.path_of(name))
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a Boolean."""
        return bool(self._typed(name, bool, default))

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """Return a whole number from `low` to `high`, both included."""
        value = self._typed(name, int, None)
        if value is None:
            return default
        if not low <= value <= high:
            raise self.type_error(name, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a number."""
        value = self._typed(name, float, default)
        return None if value is None else float(value)

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """Return one of the allowed words."""
        value = self.text(name, default)
        if value not in allowed:
            raise self.type_error(name, f"one of {', '.join(allowed)}")
        return value or default

    def table(self, name: str) -> "Fields | None":
        """Return the object in a field, or None."""
        value = self._typed(name, dict, None)
        return None if value is None else Fields(value, self.path_of(name))

    def list(self, name: str, max_count: int = 1 << 20) -> list[Any]:
        """Return a list of at most `max_count` entries; an absent list is empty."""
        value: list[Any] = self._typed(name, list, [])
        if len(value) > max_count:
            raise self._too_many(name, len(value), max_count)
        return value

    def tables(self, name: str, max_count: int = 1 << 20) -> "Iterator[Fields]":
        """Yield the objects of a list of at most `max_count` entries."""
        inner = Fields({}, self.path_of(name))
        for index, value in enumerate(self.list(name, max_count)):
            if type(value) is not dict:
                path = inner.path_of(index)
                raise ApiError(f"{path} must be an object, not {json_type(value)}", param=path)
            yield Fields(value, inner.path_of(index))

    def texts(self, name: str, max_count: int) -> tuple[str, ...]:
        """Return a text or a list of at most `max_count` texts as a tuple."""
        value = self.values.get(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.type_error(name, "text or a list of texts")
        if len(texts) > max_count:
            raise self._too_many(name, len(texts), max_count)
        return tuple(texts)

    def _too_many(self, name: str, count: int, most: int) -> ApiError:
        return ApiError(
            f"{self.path_of(name)} has {count:,} entries; the limit is {most:,}",
            param=self.path_of(name),
        )
