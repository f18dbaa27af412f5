"""Lists the fields of request bodies for people: the name, the values, the API that has the field,
and what the server does with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from llmcli.api.bodies.base import FieldEffect, RequestBody

# what the server does with a field -> the beginning of its description
EFFECT_WORDS = {
    "honored": "",
    "ignored": "No effect: ",
    "noted": "No effect, and a note says so: ",
    "refused": "Refused: ",
}
TYPE_WORDS = {
    "string": "text",
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "object": "object",
    "array": "list",
    "null": "null",
}
NULL = {"type": "null"}
MAX_BOUND = 2**31 - 2  # limits beyond it are those of a data type and say nothing


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A field of a request body. `name`: in JSON. `values`: the values that it may have, in words.
    `origin`: the API that has it.
    """

    name: str
    values: str
    origin: str
    effect: FieldEffect
    is_required: bool

    @property
    def description(self) -> str:
        """What the server does with the field, as a sentence without a period."""
        effect = self.effect
        words = f"{EFFECT_WORDS[effect.effect]}{effect.description}"
        if effect.harmless:
            shown = ", ".join(_value_text(value) for value in effect.harmless)
            words += f"; accepted: {shown}"
        if self.is_required:
            words += "; required"
        return words[:1].upper() + words[1:]


@cache
def field_rows(body_type: type[RequestBody]) -> tuple[FieldRow, ...]:
    """Return the fields of a body, sorted by their names."""
    body_type.build()
    schema = body_type.model_json_schema()
    # the JSON schema of a body that contains itself is among its definitions
    return rows_of(
        body_type, schema if "properties" in schema else schema["$defs"][body_type.__name__]
    )


def rows_of(body_type: type[RequestBody], schema: Mapping[str, Any]) -> tuple[FieldRow, ...]:
    """Return the fields of a body, sorted by their names. `schema`: its JSON schema."""
    effects, required = body_type.effects(), schema.get("required", ())
    rows = []
    for name, info in body_type.model_fields.items():
        shown = info.alias or name
        values = value_words(schema["properties"][shown])
        origin = body_type.origin_of(name)
        rows.append(FieldRow(shown, values, origin, effects[shown], shown in required))
    return tuple(sorted(rows, key=lambda row: row.name))


def inner_bodies(body_type: type[RequestBody]) -> tuple[type[RequestBody], ...]:
    """Return the bodies of all objects in a body, at any depth, each once."""
    found: dict[type[RequestBody], None] = {}
    waiting = [body_type]
    while waiting:
        for inner in _mentioned(waiting.pop(0)):
            if inner not in found and inner is not body_type:
                found[inner] = None
                waiting.append(inner)
    return tuple(found)


def value_words(schema: Mapping[str, Any]) -> str:
    """Return the values that a JSON schema of a field describes, in words."""
    if "$ref" in schema:
        return f"object `{schema['$ref'].rpartition('/')[2]}`"
    for name in ("anyOf", "oneOf"):
        if name in schema:
            words = [value_words(entry) for entry in schema[name] if entry != NULL]
            return " or ".join(dict.fromkeys(words))
    if "const" in schema:
        return _value_text(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(_value_text(value) for value in schema['enum'])}"
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(TYPE_WORDS[name] for name in kind if name != "null")
    if kind == "array":
        return f"list of {value_words(schema.get('items', {}))}{_limit(schema)}"
    return TYPE_WORDS.get(str(kind), "any") + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    """Return the limits of a number in words, or ""."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high > MAX_BOUND:
        high = None
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f", at least {low}"


def _limit(schema: Mapping[str, Any]) -> str:
    return f", at most {schema['maxItems']}" if "maxItems" in schema else ""


def _value_text(value: Any) -> str:
    """Return a value as in JSON, but a text without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_value_text(entry) for entry in value)}]"
    return str(value)


def _mentioned(body_type: type[RequestBody]) -> Iterator[type[RequestBody]]:
    """Yield the bodies in the types of a body's fields."""
    for info in body_type.model_fields.values():
        yield from _bodies_in(info.annotation)


def _bodies_in(annotation: Any) -> Iterator[type[RequestBody]]:
    if isinstance(annotation, type) and issubclass(annotation, RequestBody):
        yield annotation
    for argument in get_args(annotation):
        yield from _bodies_in(argument)


def own_rows(
    body_type: type[RequestBody], shared: Sequence[type[RequestBody]]
) -> tuple[FieldRow, ...]:
    """Return the fields of a body that differ from those of the bodies `shared`."""
    known = [row for body in shared for row in field_rows(body)]
    return tuple(row for row in field_rows(body_type) if row not in known)
