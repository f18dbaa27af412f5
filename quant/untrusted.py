"""JSON of anybody's into frozen dataclasses, kind by kind: what does not fit its field is a
ValueError, never a guess.

Knows dataclasses of str, int, float, bool, None, tuples and mappings of these, and each other. Keys
that no field has are passed over: a newer writer may know more.
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
    """The object that `text` describes. Raises ValueError, with the place, where it does not."""
    if len(text) > longest:
        raise ValueError(f"{len(text):,} characters, more than {longest:,}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    found: T = decoded(kind, value, "")
    return found


def decoded(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`; `where` names it. Raises ValueError."""
    if is_dataclass(kind):
        return _object(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return (
            None
            if value is None
            else decoded(next(one for one in inner if one is not type(None)), value, where)
        )
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        return tuple(decoded(inner[0], one, f"{where}[{at}]") for at, one in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no object")
        return {key: decoded(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    return _plain(kind, value, where)


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is no object")
    hints, found = get_type_hints(kind), {}
    for field in fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            found[field.name] = decoded(hints[field.name], value[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path} is missing")
    return kind(**found)


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, int) and abs(value) < LARGEST:
            return float(value)
    elif type(value) is kind and (kind is not int or abs(value) < LARGEST):
        if kind is str:
            value.encode()  # half a surrogate pair is no text: UnicodeEncodeError is a ValueError
        return value
    raise ValueError(f"{where} is no {kind.__name__}")
