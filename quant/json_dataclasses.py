"""Untrusted JSON into frozen dataclasses: a value that does not fit its field raises ValueError.

Supports dataclasses of str, int, float, bool, None, tuples and mappings of these, and nested
dataclasses. Unknown keys are ignored, because a newer version may have written them.
"""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
LARGEST = 2**63


def parse(kind: type[T], text: str, longest: int) -> T:
    """Return the object that `text` describes.

    `max_chars` limits the text's length in characters. Raises ValueError, with the path of the
    field, if the text does not fit `kind`.
    """
    if len(text) > longest:
        raise ValueError(f"{len(text):,} characters, more than {longest:,}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    result: T = decoded(kind, value, "")
    return result


def decoded(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as `kind`; `path` names it in errors. Raises ValueError if it does not fit."""
    if is_dataclass(kind):
        return _decode_object(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        if value is None:
            return None
        return decoded(next(item for item in inner if item is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is not a list")
        return tuple(decoded(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        return {key: decoded(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    return _decode_scalar(kind, value, where)


def _decode_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is not an object")
    hints, arguments = get_type_hints(kind), {}
    for field in fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            arguments[field.name] = decoded(hints[field.name], value[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path} is missing")
    return kind(**arguments)


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, int) and abs(value) < LARGEST:
            return float(value)
    elif type(value) is kind and (kind is not int or abs(value) < LARGEST):
        if kind is str:
            value.encode()  # rejects half a surrogate pair: UnicodeEncodeError is a ValueError
        return value
    raise ValueError(f"{where} is not of type {kind.__name__}")
