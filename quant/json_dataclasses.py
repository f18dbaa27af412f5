"""Reads JSON of this project's own files within limits, parses it into frozen dataclasses, and turns
dataclasses into JSON values.

The files may be damaged or written by a stranger. Every reader raises ValueError for whatever is
wrong with a text: its size, its encoding, its nesting, its numbers, and values that do not fit.
Unknown keys are ignored, because a newer version may have written them.

Supported are dataclasses of str, int, float, bool, None, Literal, Any, unions, tuples, lists and
mappings of these, and nested dataclasses. A field's key is its name, or the key given with
`field(metadata=json_key(...))`.
"""

import functools
import json
import math
import os
import stat
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
MAX_NUMBER = 2**63
MAX_DIGITS = 20  # of an integer; longer integers cannot become a float, or be printed
MAX_DEPTH = 64  # arrays and objects inside one another
KEY_METADATA = "json_key"


def json_key(name: str) -> dict[str, str]:
    """Return the `metadata` argument of a dataclass field whose JSON key differs from the field's
    name.
    """
    return {KEY_METADATA: name}


def encode_value(value: Any) -> Any:
    """Return `value` in a form that json.dumps() accepts: dataclasses become dictionaries and
    tuples become lists, at every level of nesting.
    """
    if is_dataclass(value):
        return {_key(field): encode_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_value(item) for item in value]
    return value


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises OSError if it cannot be read, and ValueError if it
    is not a regular file or has more than `max_bytes` bytes.
    """
    # O_NONBLOCK: opening a pipe must not wait for its writer
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return raw


def read_json(kind: type[T], path: Path, max_bytes: int) -> T:
    """Read a JSON file into an instance of the dataclass `kind`. Raises OSError if the file cannot
    be read, and ValueError as `read_file` and `parse_json` do.
    """
    return parse_json(kind, read_file(path, max_bytes), max_bytes)


def parse_json(kind: type[T], raw: str | bytes, max_length: int) -> T:
    """Parse a JSON text into an instance of the dataclass `kind`.

    Raises ValueError as `parse_value` does, and if the text does not fit `kind`. The message then
    contains the path of the field ("speed[0].low").
    """
    result: T = decode_value(kind, parse_value(raw, max_length), "")
    return result


def parse_value(raw: str | bytes, max_length: int, *, decode_errors: str = "strict") -> Any:
    """Return the value of a JSON text.

    Raises ValueError if the text is longer than `max_length` (characters, or bytes), is not JSON,
    is nested deeper than MAX_DEPTH, or has NaN, Infinity, a number beyond the range of a double, an
    integer of more than MAX_DIGITS digits, or half of a surrogate pair. `decode_errors`: what
    bytes.decode() does with bytes that are not UTF-8.
    """
    if len(raw) > max_length:
        raise ValueError(f"{len(raw):,} characters, more than {max_length:,}")
    text = raw if isinstance(raw, str) else raw.decode("utf-8", decode_errors)
    try:
        value = json.loads(
            text.removeprefix("\ufeff"),
            parse_constant=refuse_constant,
            parse_float=parse_finite_float,
            parse_int=_parse_int,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if "\\ud" in text.lower():
        _require_encodable(json.dumps(value, ensure_ascii=False))
    return value


def parse_object(
    raw: str | bytes, max_length: int, *, decode_errors: str = "strict"
) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ValueError as `parse_value` does, and if the value
    is not an object.
    """
    value = parse_value(raw, max_length, decode_errors=decode_errors)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def decode_value(kind: Any, value: Any, path: str) -> Any:
    """Convert a parsed JSON value to `kind`, which is a dataclass or the type of a dataclass field.
    `path` is the position of the value in the document, for error messages. Raises ValueError if
    the value does not fit.
    """
    if kind is Any or kind is object:
        return value
    if is_dataclass(kind):
        return _decode_object(kind, value, path)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return _decode_union(inner, value, path)
    if origin is Literal:
        if any(type(value) is type(item) and value == item for item in inner):
            return value
        raise ValueError(f"{path} is none of {', '.join(map(repr, inner))}")
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise ValueError(f"{path} is not a list")
        return origin(_decode_items(inner, value, path))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{path} is not an object")
        return {key: decode_value(inner[1], item, f"{path}.{key}") for key, item in value.items()}
    return _decode_scalar(kind, value, path)


def _decode_items(kinds: tuple[Any, ...], values: list[Any], path: str) -> list[Any]:
    """Convert the items of a list. `kinds` are the arguments of the list's or tuple's type: one
    type for all items, or a type for each.
    """
    if len(kinds) > 1 and kinds[-1] is not Ellipsis:
        if len(values) != len(kinds):
            raise ValueError(f"{path} has {len(values)} items instead of {len(kinds)}")
        pairs = list(zip(kinds, values, strict=True))
    else:
        pairs = [(kinds[0], item) for item in values]
    return [decode_value(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(pairs)]


def _decode_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """Convert a value to the first type of a union that it fits."""
    if value is None and type(None) in kinds:
        return None
    error = ValueError(f"{path} has no type")
    for kind in kinds:
        if kind is not type(None):
            try:
                return decode_value(kind, value, path)
            except ValueError as refusal:
                error = refusal
    raise error


def _decode_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is not an object")
    hints, arguments = _type_hints(kind), {}
    for field in fields(kind):
        key = _key(field)
        path = f"{where}.{key}" if where else key
        if key in value:
            arguments[field.name] = decode_value(hints[field.name], value[key], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path} is missing")
    return kind(**arguments)


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _key(field: "Field[Any]") -> str:
    key: str = field.metadata.get(KEY_METADATA, field.name)
    return key


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, int) and abs(value) < MAX_NUMBER:
            return float(value)
    elif type(value) is kind and (kind is not int or abs(value) < MAX_NUMBER):
        if kind is str:
            _require_encodable(value)
        return value
    raise ValueError(f"{where} is not of type {kind.__name__}")


def _require_encodable(text: str) -> None:
    """Raise ValueError if a text has half of a surrogate pair. Those that stand for bytes of a file
    name that is not UTF-8 are allowed.
    """
    text.encode("utf-8", "surrogateescape")  # UnicodeEncodeError is a ValueError


def _check_depth(value: Any) -> None:
    """Raise ValueError if a value is nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"{digits[:MAX_DIGITS]}… is too large a number")
    return int(digits)


def parse_finite_float(word: str) -> float:
    """Return a JSON number as a float. Raises ValueError if it is beyond the range of a double."""
    number = float(word)
    if math.isinf(number):
        raise ValueError(f"{word[:40]} is too large a number")
    return number


def refuse_constant(word: str) -> None:
    """Raise ValueError for NaN, Infinity or -Infinity."""
    raise ValueError(f"{word} is no number of JSON")
