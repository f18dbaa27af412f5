"""Rewrite the keywords of JSON Schema for types, constants, numbers and strings."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from llmcli.runtime.constraint.json_schema.cost import MAX_COUNTS, count_remainders
from llmcli.runtime.constraint.json_schema.facts import TYPES, value_type
from llmcli.runtime.constraint.json_schema.formats import (
    FREE_FORMATS,
    INTEGER_BOUNDS,
    NATIVE_FORMATS,
    STRING_FORMATS,
)
from llmcli.runtime.constraint.json_schema.patterns import UnsupportedPattern, translate_pattern
from llmcli.runtime.constraint.json_schema.writer import SchemaWriter

# Words for types in the schemas of people and programs.
TYPE_NAMES = {
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "decimal": "number",
    "str": "string",
    "bool": "boolean",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "none": "null",
}
LARGEST_EXACT = 2**53  # up to here a 64-bit float represents every integer exactly
LARGEST_INTEGER = 2**63 - 1024  # the largest float that llguidance holds as an integer


def write_type(writer: SchemaWriter, value: Any) -> None:
    """Write `type`, one name or a list of them."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        writer.refuse("type", value)
        return
    allowed: list[str] = []
    for name in names:
        known = name if name in TYPES else TYPE_NAMES.get(name.lower(), name.lower())
        if known not in TYPES and known != "any":
            writer.rewriter.note(f"type {json.dumps(name)[:100]}", writer.location, is_error=True)
            return
        if known != name:
            writer.note(f"type {json.dumps(name)}", f"no type of JSON Schema; taken as {known}")
        if known == "any":
            return
        allowed.append(known)
    writer.add({"type": allowed if isinstance(value, list) else allowed[0]})


def write_const(writer: SchemaWriter, value: Any) -> None:
    """Write `const`."""
    _write_values(writer, "const", [value])


def write_enum(writer: SchemaWriter, value: Any) -> None:
    """Write `enum`."""
    if isinstance(value, list):
        _write_values(writer, "enum", value)
    else:
        writer.refuse("enum", value)


def _write_values(writer: SchemaWriter, key: str, values: list[Any]) -> None:
    """Write const or enum, or only the types of the values if a number among them is inexact."""
    if all(map(_is_exact, values)):
        writer.add({key: values[0] if key == "const" else values})
        return
    writer.note(f"{key}", "a number beyond 2^53")
    writer.add({"type": sorted(set(map(value_type, values)))})


def _is_exact(value: Any) -> bool:
    """Return whether all numbers in a JSON value are at most 2^53. llguidance computes in 64-bit
    floats, so it would not enforce larger numbers exactly.
    """
    if isinstance(value, (dict, list)):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, (int, float)) or abs(value) <= LARGEST_EXACT


def write_bound(writer: SchemaWriter, key: str, value: Any) -> None:
    """Write a bound of numbers. In draft 4 an exclusive bound is a boolean that changes the other
    bound.
    """
    is_lower = key in ("minimum", "exclusiveMinimum")
    if isinstance(value, bool) and key.startswith("exclusive"):
        plain = writer.schema.get("minimum" if is_lower else "maximum")
        if not value or not _is_number(plain):
            return
        value = plain
    if not _is_number(value):
        writer.refuse(key, value)
        return
    bound = _nearest_float(value, upwards=is_lower)
    if abs(bound) > LARGEST_INTEGER:
        if (bound > 0) == is_lower:  # no integer of 64 bits satisfies it
            writer.note(key, "a number beyond 2^63")
            return
        bound = math.copysign(LARGEST_INTEGER, bound)
    writer.add({key: int(bound) if bound == int(bound) else bound})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _nearest_float(value: float, upwards: bool) -> float:
    """Return the 64-bit float next to a number that is not below it, or with `upwards` false not
    above it.
    """
    result = float(value)
    if upwards and result < value:
        return math.nextafter(result, math.inf)
    if not upwards and result > value:
        return math.nextafter(result, -math.inf)
    return result


def write_multiple(writer: SchemaWriter, value: Any) -> None:
    """Write `multipleOf`."""
    if not _is_number(value):
        writer.refuse("multipleOf", value)
    elif count_remainders(value) > MAX_COUNTS["steps"]:
        writer.note("multipleOf", "it has too many digits")
    else:
        writer.add({"multipleOf": value})


def write_count(writer: SchemaWriter, key: str, value: Any) -> None:
    """Write a count of characters, elements or properties. It may be a float such as 2.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        writer.add({key: value})
    else:
        writer.refuse(key, value)


def write_pattern(writer: SchemaWriter, value: Any) -> None:
    """Write `pattern`, as one or several patterns that llguidance understands."""
    if not isinstance(value, str):
        writer.refuse("pattern", value)
        return
    try:
        patterns = translate_pattern(value)
    except UnsupportedPattern as unsupported:
        writer.note("pattern", str(unsupported))
        return
    for pattern in patterns:
        writer.add({"pattern": pattern})


def write_format(writer: SchemaWriter, value: Any) -> None:
    """Write `format` as a pattern or as bounds. It says nothing about values of other types."""
    if not isinstance(value, str):
        writer.refuse("format", value)
        return
    types = writer.facts.types
    if value in INTEGER_BOUNDS:
        if "integer" in types and "number" not in types:
            low, high = INTEGER_BOUNDS[value]
            _write_integer_bounds(writer, low, high)
        return
    if value in FREE_FORMATS or "string" not in types:
        return
    if value in NATIVE_FORMATS:
        writer.add({"format": value})
    elif value in STRING_FORMATS:
        writer.add(STRING_FORMATS[value].keywords)
    else:
        writer.note(f"format {json.dumps(value)[:100]}")


def _write_integer_bounds(writer: SchemaWriter, low: int, high: int | None) -> None:
    """Write the range of a type of integers, as far as 64 bits go."""
    bounds: dict[str, Any] = {"minimum": max(low, -LARGEST_INTEGER)}
    if high is not None:
        bounds["maximum"] = min(high, LARGEST_INTEGER)
        if high > LARGEST_EXACT:
            bounds["maximum"] = LARGEST_INTEGER
    writer.conjuncts.append(bounds)


KEYWORDS: Mapping[str, Callable[[SchemaWriter, Any], None]] = {
    "type": write_type,
    "const": write_const,
    "enum": write_enum,
    "multipleOf": write_multiple,
    "pattern": write_pattern,
    "format": write_format,
    **{
        key: lambda writer, value, key=key: write_bound(writer, key, value)  # type: ignore[misc]
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    },
    **{
        key: lambda writer, value, key=key: write_count(writer, key, value)  # type: ignore[misc]
        for key in (
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "minProperties",
            "maxProperties",
        )
    },
}
