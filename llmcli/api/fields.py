"""Type-checked access to the fields of a client's JSON object. Every error names the path of the
wrong field, such as `messages[0].content`.
"""

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
    """Return the type of a JSON value in words for an error message, such as "a list"."""
    if value is None:
        return "null"
    return next(
        (words for type_, words in TYPE_NAMES.items() if type(value) is type_), type(value).__name__
    )


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of a request. `path`: where the object is in the request, such as
    `messages[0]`; empty for the request itself. All methods treat null as a missing field and raise
    ApiError for a value of the wrong type.
    """

    values: Mapping[str, Any]
    path: str = ""

    def path_of(self, name: str | int) -> str:
        """Return the path of the field `name`, or of the list entry with the index `name`."""
        if isinstance(name, int):
            return f"{self.path}[{name}]"
        return f"{self.path}.{name}" if self.path else name

    def type_error(self, name: str, expected: str) -> ApiError:
        """Return the error for a field whose value is not `expected`, for example "a list"."""
        value = self.values.get(name)
        shown = repr(value)[:60] if isinstance(value, str | int | float) else json_type(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        path = self.path_of(name)
        return ApiError(f"{path} must be {expected}, not {shown}", param=path)

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(name) is not None

    def _typed(self, name: str, type_: type, default: Any) -> Any:
        """Return the value of a field, or `default` if the field is missing. A whole number is
        accepted where a float is expected. Raises ApiError for any other type.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not type_ and not (type_ is float and type(value) is int):
            raise self.type_error(name, TYPE_NAMES[type_])
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the string in a field, or `default` if the field is missing."""
        value: str | None = self._typed(name, str, default)
        return value

    def required_text(self, name: str) -> str:
        """Return the string in a field. Raises ApiError if the field is missing."""
        value = self.text(name)
        if value is None:
            raise ApiError(f"{self.path_of(name)} is missing", param=self.path_of(name))
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return the Boolean in a field, or `default` if the field is missing."""
        return bool(self._typed(name, bool, default))

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """Return the whole number in a field, or `default` if the field is missing. Raises ApiError
        unless `low <= number <= high`.
        """
        value = self._typed(name, int, None)
        if value is None:
            return default
        if not low <= value <= high:
            raise self.type_error(name, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return the number in a field as a float, or `default` if the field is missing."""
        value = self._typed(name, float, default)
        return None if value is None else float(value)

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """Return the string in a field, or `default` if the field is missing. Raises ApiError if
        the string is not in `allowed`.
        """
        value = self.text(name, default)
        if value not in allowed:
            raise self.type_error(name, f"one of {', '.join(allowed)}")
        return value or default

    def table(self, name: str) -> "Fields | None":
        """Return the object in a field, or None if the field is missing."""
        value = self._typed(name, dict, None)
        return None if value is None else Fields(value, self.path_of(name))

    def list(self, name: str, max_count: int = 1 << 20) -> list[Any]:
        """Return the list in a field, or an empty list if the field is missing. Raises ApiError if
        it has more than `max_count` entries.
        """
        value: list[Any] = self._typed(name, list, [])
        if len(value) > max_count:
            raise self._too_many(name, len(value), max_count)
        return value

    def tables(self, name: str, max_count: int = 1 << 20) -> "Iterator[Fields]":
        """Yield the objects of the list in a field. Raises ApiError if an entry is not an object,
        or if the list has more than `max_count` entries.
        """
        inner = Fields({}, self.path_of(name))
        for index, value in enumerate(self.list(name, max_count)):
            if type(value) is not dict:
                path = inner.path_of(index)
                raise ApiError(f"{path} must be an object, not {json_type(value)}", param=path)
            yield Fields(value, inner.path_of(index))

    def texts(self, name: str, max_count: int) -> tuple[str, ...]:
        """Return the strings in a field as a tuple. The field is one string or a list of strings; a
        missing field gives an empty tuple. Raises ApiError for more than `max_count` strings.
        """
        value = self.values.get(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.type_error(name, "text or a list of texts")
        if len(texts) > max_count:
            raise self._too_many(name, len(texts), max_count)
        return tuple(texts)

    def _too_many(self, name: str, count: int, limit: int) -> ApiError:
        return ApiError(
            f"{self.path_of(name)} has {count:,} entries; the limit is {limit:,}",
            param=self.path_of(name),
        )
