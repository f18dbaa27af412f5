"""Parses untrusted JSON into frozen dataclasses, and turns dataclasses into JSON values.

Supports dataclasses of str, int, float, bool, None, tuples and mappings of these, and nested
dataclasses. A value that does not fit its field raises ValueError. Unknown keys are ignored,
because a newer version may have written them. A field's key is its name, or the key given with
`field(metadata=json_key(...))`.
"""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
MAX_NUMBER = 2**63
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


def parse_json(kind: type[T], text: str, max_chars: int) -> T:
    """Parse a JSON text into an instance of the dataclass `kind`.

    Raises ValueError if the text is longer than `max_chars`, is not JSON, or does not fit `kind`.
    In the last case the message contains the path of the field ("speed[0].low").
    """
    if len(text) > max_chars:
        raise ValueError(f"{len(text):,} characters, more than {max_chars:,}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    result: T = decode_value(kind, value, "")
    return result


def decode_value(kind: Any, value: Any, path: str) -> Any:
    """Convert a parsed JSON value to `kind`, which is a dataclass or the type of a dataclass field.
    `path` is the position of the value in the document, for error messages. Raises ValueError if
    the value does not fit.
    """
    if is_dataclass(kind):
        return _decode_object(kind, value, path)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        if value is None:
            return None
        return decode_value(next(item for item in inner if item is not type(None)), value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path} is not a list")
        return tuple(decode_value(inner[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{path} is not an object")
        return {key: decode_value(inner[1], item, f"{path}.{key}") for key, item in value.items()}
    return _decode_scalar(kind, value, path)


def _decode_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is not an object")
    hints, arguments = get_type_hints(kind), {}
    for field in fields(kind):
        key = _key(field)
        path = f"{where}.{key}" if where else key
        if key in value:
            arguments[field.name] = decode_value(hints[field.name], value[key], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path} is missing")
    return kind(**arguments)


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
            value.encode()  # fails for half of a surrogate pair: UnicodeEncodeError is a ValueError
        return value
    raise ValueError(f"{where} is not of type {kind.__name__}")
