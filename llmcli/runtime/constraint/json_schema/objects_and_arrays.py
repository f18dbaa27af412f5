"""Rewrite the keywords of JSON Schema for objects and arrays."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from llmcli.runtime.constraint.json_schema.facts import ITEMS_NAME, OTHERS_NAME, ValueFacts
from llmcli.runtime.constraint.json_schema.formats import STRING_FORMATS
from llmcli.runtime.constraint.json_schema.patterns import UnsupportedPattern, translate_pattern
from llmcli.runtime.constraint.json_schema.writer import EXACT, SchemaWriter

MAX_UNIQUE = 4  # of how many constants all orders are listed
MAX_CHOICES = 24  # maximum number of alternatives that a count of properties becomes
UUID = STRING_FORMATS["guid"].keywords["pattern"]


def write_properties(writer: SchemaWriter, value: Any) -> None:
    """Write `properties`."""
    if not isinstance(value, dict):
        writer.refuse("properties", value)
        return
    schemas = {
        name: writer.rewrite("properties", name, scope=writer.inner_scope.of_property(name))
        for name in value
    }
    writer.add({"properties": schemas})


def write_pattern_properties(writer: SchemaWriter, value: Any) -> None:
    """Write `patternProperties`."""
    if not isinstance(value, dict):
        writer.refuse("patternProperties", value)
        return
    schemas = {}
    for name in value:
        pattern = _name_pattern(name)
        if pattern is None:
            writer.note(f"patternProperties {name[:100]}", "no grammar can follow the pattern")
        else:
            scope = writer.inner_scope.of_property(OTHERS_NAME)
            schemas[pattern] = writer.rewrite("patternProperties", name, scope=scope)
    writer.add({"patternProperties": schemas})


def _name_pattern(pattern: str) -> str | None:
    """Return a key of patternProperties as llguidance understands it, or None."""
    try:
        patterns = translate_pattern(pattern)
    except UnsupportedPattern:
        return None
    return patterns[0] if len(patterns) == 1 else None


def write_additional_properties(writer: SchemaWriter, value: Any) -> None:
    """Write `additionalProperties`."""
    scope = writer.inner_scope.of_property(OTHERS_NAME)
    writer.result["additionalProperties"] = writer.rewrite("additionalProperties", scope=scope)


def write_unevaluated_properties(writer: SchemaWriter, value: Any) -> None:
    """Keep `unevaluatedProperties` for the time when all alternatives are written."""
    scope = writer.inner_scope.of_property(OTHERS_NAME)
    writer.unevaluated = writer.rewrite("unevaluatedProperties", scope=scope)


def write_required(writer: SchemaWriter, value: Any) -> None:
    """Write `required`. SchemaDraft 3 had a boolean there, in the schema of the property."""
    if isinstance(value, bool):
        if value:
            writer.note("required", "it must be a list of names beside `properties`")
    elif isinstance(value, list) and all(isinstance(name, str) for name in value):
        writer.add({"required": value})
    else:
        writer.refuse("required", value)


def write_property_names(writer: SchemaWriter, value: Any) -> None:
    """Write `propertyNames` as the names or the pattern that properties must have."""
    schema = writer.rewrite("propertyNames", scope=EXACT)
    while isinstance(schema, dict) and schema.keys() == {"$ref"}:
        schema = writer.rewriter.look_up(schema["$ref"])
    keys = set(schema) if isinstance(schema, dict) else set()
    accepts_strings = schema is True or (
        isinstance(schema, dict) and "string" in _type_list(schema)
    )
    table: dict[str, Any] = {"additionalProperties": False}
    if accepts_strings and keys <= {"type"}:
        return
    if not accepts_strings:
        pass
    elif keys <= {"type", "const", "enum"}:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        table["properties"] = {name: True for name in values if isinstance(name, str)}
    elif keys <= {"type", "pattern"}:
        table["patternProperties"] = {schema["pattern"]: True}
    elif keys <= {"type", "minLength", "maxLength"}:
        bounds = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        table["patternProperties"] = {rf"^[\s\S]{bounds}$": True}
    elif schema.get("format") == "uuid" and keys <= {"type", "format"}:
        table["patternProperties"] = {UUID: True}
    else:
        writer.note("propertyNames")
        return
    writer.conjuncts.append(table)


def _type_list(schema: dict[str, Any]) -> list[str]:
    """Return the types of a rewritten schema without constants."""
    named = schema.get("type", "string")
    return [named] if isinstance(named, str) else named


def write_dependent_required(writer: SchemaWriter, value: Any) -> None:
    """Write `dependentRequired`: a property is missing, or others are there, too."""
    if not isinstance(value, dict):
        writer.refuse("dependentRequired", value)
        return
    for name, others in value.items():
        if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
            writer.refuse("dependentRequired", others)
        elif others:
            _add_dependency(writer, name, {"required": [name, *others]})


def write_dependent_schemas(writer: SchemaWriter, key: str, value: Any) -> None:
    """Write `dependentSchemas`, or the `dependencies` of earlier drafts, which may also be lists
    of names.
    """
    if not isinstance(value, dict):
        writer.refuse(key, value)
        return
    for name, dependency in value.items():
        if isinstance(dependency, list) and key == "dependencies":
            if dependency:
                _add_dependency(writer, name, {"required": [name, *map(str, dependency)]})
            continue
        schema = writer.rewrite(key, name, scope=writer.inner_scope)
        _add_dependency(writer, name, {"required": [name], "allOf": [schema]})


def _add_dependency(writer: SchemaWriter, name: str, with_name: dict[str, Any]) -> None:
    """Add the alternatives that a property is missing or that `with_name` holds."""
    writer.conjuncts.append({"anyOf": [{"properties": {name: False}}, with_name]})


def write_items(writer: SchemaWriter, value: Any) -> None:
    """Write `items`. Until draft 2019-09 it could be a list, which is now called prefixItems."""
    scope = writer.inner_scope.of_property(ITEMS_NAME)
    if not isinstance(value, list):
        writer.result["items"] = writer.rewrite("items", scope=scope)
        return
    prefix = [writer.rewrite("items", number, scope=scope) for number in range(len(value))]
    writer.add({"prefixItems": prefix})
    if "additionalItems" in writer.schema:
        writer.result["items"] = writer.rewrite("additionalItems", scope=scope)


def write_prefix_items(writer: SchemaWriter, value: Any) -> None:
    """Write `prefixItems`."""
    if not isinstance(value, list):
        writer.refuse("prefixItems", value)
        return
    scope = writer.inner_scope.of_property(ITEMS_NAME)
    prefix = [writer.rewrite("prefixItems", number, scope=scope) for number in range(len(value))]
    writer.add({"prefixItems": prefix})


def write_unique_items(writer: SchemaWriter, value: Any) -> None:
    """Write `uniqueItems`, if there is at most one element, or if the elements are a few constants
    whose orders can be listed.
    """
    if not isinstance(value, bool):
        writer.refuse("uniqueItems", value)
        return
    low, high = writer.schema.get("minItems", 0), writer.schema.get("maxItems", math.inf)
    if not value or not isinstance(high, (int, float)) or high <= 1:
        return
    constants = _item_constants(writer)
    if constants is None or not isinstance(low, (int, float)):
        writer.note("uniqueItems")
        return
    lengths = range(math.ceil(low), int(min(high, len(constants))) + 1)
    orders = [order for size in lengths for order in itertools.permutations(constants, size)]
    writer.conjuncts.append(
        {
            "anyOf": [
                {
                    "type": "array",
                    "prefixItems": [{"const": constant} for constant in order],
                    "minItems": len(order),
                    "maxItems": len(order),
                }
                for order in orders
            ]
        }
    )


def _item_constants(writer: SchemaWriter) -> list[Any] | None:
    """Return the values that the elements of an array can have, if these are a few simple ones."""
    if "items" not in writer.schema or "prefixItems" in writer.schema:
        return None
    items = writer.rewriter.write_exactly(writer.schema["items"], (*writer.location, "items"))
    schema = items.schema
    while isinstance(schema, dict) and schema.keys() == {"$ref"}:
        schema = writer.rewriter.look_up(schema["$ref"])
    if not isinstance(schema, dict) or not schema.keys() <= {"type", "enum"}:
        return None
    constants = schema.get("enum", [True, False] if schema.get("type") == "boolean" else [])
    texts = {json.dumps(constant) for constant in constants}
    is_simple = all(not isinstance(constant, (list, dict, float)) for constant in constants)
    is_small = 0 < len(texts) == len(constants) <= MAX_UNIQUE
    return constants if is_simple and is_small else None


def write_contains(writer: SchemaWriter, value: Any) -> None:
    """Write `contains`, if every element satisfies it or none need to."""
    minimum, schema = writer.schema.get("minContains", 1), writer.schema
    if minimum == 0 and "maxContains" not in schema:
        return
    if (value in (True, {}) or value == schema.get("items")) and "maxContains" not in schema:
        writer.conjuncts.append({"minItems": int(minimum)})
    else:
        writer.note("contains")


def write_unevaluated_items(writer: SchemaWriter, value: Any) -> None:
    """Write `unevaluatedItems` as `items`, where no other schema evaluates elements."""
    if "items" in writer.schema and not isinstance(writer.schema["items"], list):
        return
    if "additionalItems" in writer.schema and isinstance(writer.schema.get("items"), list):
        return
    facts = writer.facts
    is_alone = facts.names.get(ITEMS_NAME, 0) <= 1 and not facts.has_alternatives
    if not is_alone or "contains" in writer.schema:
        writer.note("unevaluatedItems")
        return
    scope = writer.inner_scope.of_property(ITEMS_NAME)
    writer.result["items"] = writer.rewrite("unevaluatedItems", scope=scope)


def close_object(facts: ValueFacts, others: Any = False, with_required: bool = True) -> Any:
    """Return a schema that allows any value for the described properties, and `others` for the
    rest. `with_required`: properties that are only required are also allowed.
    """
    patterns = [_name_pattern(pattern) for pattern in facts.patterns]
    closed: dict[str, Any] = {
        "properties": dict.fromkeys(facts.property_names(with_required), True)
    }
    if any(patterns):
        closed["patternProperties"] = {pattern: True for pattern in patterns if pattern}
    return closed | {"additionalProperties": others}


def choose_properties(writer: SchemaWriter) -> None:
    """Replace minProperties and maxProperties of a written schema by alternatives, which name the
    optional properties that are there or missing. llguidance counts only where all properties of
    an object are required, and at most one optional property.
    """
    result = writer.result
    low, high = result.get("minProperties", 0), result.get("maxProperties")
    required = set(result.get("required", ()))
    is_closed = result.get("additionalProperties") is False and not result.get("patternProperties")
    if not is_closed or writer.has_conjuncts:
        if low > max(1, len(required)):
            # a repeated name would count as one property
            writer.note(f"minProperties {low}")
            del result["minProperties"]
        return
    optional = [
        name
        for name, schema in result.get("properties", {}).items()
        if name not in required and schema is not False
    ]
    needed = low - len(required)
    room = len(optional) if high is None else high - len(required)
    if room < 0 or needed > len(optional) or (needed <= 1 and high is None) or not optional:
        return
    missing = len(optional) - room
    present_choices = list(_choices(optional, needed))
    missing_choices = list(_choices(optional, missing))
    if max(len(present_choices), len(missing_choices)) > MAX_CHOICES:
        return
    result.pop("minProperties", None)
    result.pop("maxProperties", None)
    if needed > 0:
        writer.conjuncts.append({"anyOf": [{"required": list(names)} for names in present_choices]})
    if missing > 0:
        writer.conjuncts.append(
            {"anyOf": [{"properties": dict.fromkeys(names, False)} for names in missing_choices]}
        )


def _choices(names: list[str], count: int) -> list[tuple[str, ...]]:
    """Return up to MAX_CHOICES + 1 ways to choose `count` of the names."""
    combinations = itertools.combinations(names, max(0, count))
    return list(itertools.islice(combinations, MAX_CHOICES + 1))


KEYWORDS: Mapping[str, Callable[[SchemaWriter, Any], None]] = {
    "properties": write_properties,
    "patternProperties": write_pattern_properties,
    "additionalProperties": write_additional_properties,
    "unevaluatedProperties": write_unevaluated_properties,
    "required": write_required,
    "propertyNames": write_property_names,
    "dependentRequired": write_dependent_required,
    "dependentSchemas": lambda writer, value: write_dependent_schemas(
        writer, "dependentSchemas", value
    ),
    "dependencies": lambda writer, value: write_dependent_schemas(writer, "dependencies", value),
    "items": write_items,
    "prefixItems": write_prefix_items,
    "uniqueItems": write_unique_items,
    "contains": write_contains,
    "unevaluatedItems": write_unevaluated_items,
}
