"""Relax a rewritten JSON schema where llguidance refuses it, for schemas that need not be followed
strictly.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmcli.runtime.constraint.json_schema.check import CheckedSchema

# The keywords that are left out of a refused schema, the likeliest reason first.
SUSPECTS = (
    "pattern",
    "format",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "multipleOf",
    "maxLength",
    "minLength",
    "maxItems",
    "minItems",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "const",
    "enum",
    "allOf",
    "anyOf",
    "additionalProperties",
    "properties",
    "$ref",
)
# Keywords that go with another one: without its patterns, an object would have no properties.
WITH_IT = {"patternProperties": ("additionalProperties",)}
UNSATISFIABLE = "Unsatisfiable schema"  # the beginning of llguidance's reason
Refusal = Callable[[str], str | None]  # the reason for which llguidance refuses a schema, or None


def relax_schema(checked: CheckedSchema, refusal: Refusal) -> CheckedSchema | None:
    """Return the schema without the keywords that llguidance refuses, which `not_enforced` then
    names. Return None if no document satisfies the schema, or if nothing helps.

    `refusal`: returns the reason for which llguidance refuses the text of a schema.
    """
    notes: dict[str, None] = dict.fromkeys(checked.not_enforced)
    for path, text in (*checked.inner_schemas(), ("#", checked.text)):
        # the inner schemas of this one may have been changed
        schema = checked.schemas[path]
        definitions = {"$defs": checked.root["$defs"]} if "$defs" in checked.root else {}
        reason = refusal(text) and refusal(json.dumps({**schema, **definitions}))
        if not reason:
            continue
        if reason.startswith(UNSATISFIABLE):
            if path == "#":
                return None
            continue
        dropped = _drop_keyword(schema, definitions, refusal)
        if dropped is None:
            return None
        notes[f"{dropped} at {checked.origins[path]} ({reason})"] = None
    return replace(checked, not_enforced=tuple(notes))


def _drop_keyword(
    schema: dict[str, Any], definitions: dict[str, Any], refusal: Refusal
) -> str | None:
    """Remove the keyword for which a schema is refused, or all but its type. Return what was
    removed, or None if nothing helps.
    """
    for suspect in SUSPECTS:
        if suspect not in schema:
            continue
        keys = {suspect, *WITH_IT.get(suspect, ())} & schema.keys()
        remaining = {name: value for name, value in schema.items() if name not in (*keys, "$defs")}
        if refusal(json.dumps({**remaining, **definitions})) is None:
            for key in keys:
                del schema[key]
            return ", ".join(sorted(keys, reverse=True))
    names = [key for key in schema if key not in ("type", "$defs")]
    remaining = {"type": schema["type"]} if "type" in schema else {}
    if refusal(json.dumps(remaining)) is not None:
        return None
    for key in names:
        del schema[key]
    return ", ".join(names)
