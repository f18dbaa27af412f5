"""Negate JSON schemas, for the keywords not, if and oneOf. The schemas are in the normal form of
rewriting.py.
"""

import itertools
from collections.abc import Callable
from typing import Any

from llmcli.runtime.constraint.json_schema.facts import TYPES, value_type
from llmcli.runtime.constraint.json_schema.overlap import Lookup, equal_values
from llmcli.runtime.constraint.json_schema.patterns import UnsupportedPattern, exclude_strings

MAX_LEVELS = 8  # how deep a schema is negated
MAX_STEPS = 10_000  # how many schemas of a document are negated
MAX_ALTERNATIVES = 40  # maximum number of alternatives of a negated schema
# A lower bound of a length is negated as an upper bound that is one less, and the reverse.
LENGTH_KEYS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
BOUND_KEYS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


class NoNegation(ValueError):
    """Raised for a schema whose opposite JSON Schema cannot say in the keywords of a grammar."""


class Negator:
    """Negates schemas."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._n_steps = 0  # how many schemas were negated

    def negate(self, schema: Any, levels: int = MAX_LEVELS) -> Any:
        """Return the schema of all values that do not satisfy `schema`. Raises NoNegation."""
        if isinstance(schema, bool):
            return not schema
        self._n_steps += 1
        if levels == 0 or self._n_steps > MAX_STEPS or not isinstance(schema, dict):
            raise NoNegation
        alternatives: list[Any] = []
        for key, value in schema.items():
            alternatives += self._negate_keyword(key, value, schema, levels - 1)
        alternatives = [alternative for alternative in alternatives if alternative is not False]
        if len(alternatives) > MAX_ALTERNATIVES:
            raise NoNegation
        if any(alternative is True for alternative in alternatives):
            return True
        if not alternatives:
            return False
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}

    def _negate_keyword(
        self, key: str, value: Any, schema: dict[str, Any], levels: int
    ) -> list[Any]:
        """Return alternatives of which one holds where the keyword does not."""
        if key in LENGTH_KEYS:
            type_name, opposite, step = LENGTH_KEYS[key]
            return [{"type": type_name, opposite: value + step}] if value + step >= 0 else []
        if key in BOUND_KEYS:
            return [{"type": "number", BOUND_KEYS[key]: value}]
        simple: dict[str, Callable[[Any], list[Any]]] = {
            "type": _negate_type,
            "const": lambda const: _negate_values([const]),
            "enum": _negate_values,
            "required": lambda names: [
                {"type": "object", "properties": {name: False}} for name in names
            ],
        }
        if key in simple:
            return simple[key](value)
        if key == "properties":
            return [
                {"type": "object", "properties": {name: opposite}, "required": [name]}
                for name, inner in value.items()
                for opposite in [self.negate(inner, levels)]
                if opposite is not False
            ]
        if key == "allOf":
            return [self.negate(part, levels) for part in value]
        if key == "anyOf":
            return [{"allOf": [self.negate(part, levels) for part in value]}]
        if key == "$ref":
            return [self.negate(self._lookup(value), levels)]
        if key in ("additionalProperties", "items") and value is True:
            return []
        raise NoNegation


def _negate_type(named: Any) -> list[Any]:
    """Return the schema of all other types."""
    names = {named} if isinstance(named, str) else set(named)
    if "integer" in names and "number" not in names:
        raise NoNegation  # no keyword allows only numbers with a fraction
    others = TYPES - names - ({"integer"} if "number" in names else set())
    return _only_types(others - {"integer"}) if "number" in others else _only_types(others)


def _only_types(names: frozenset[str] | set[str]) -> list[Any]:
    """Return a list with the schema of these types; an empty list for no types."""
    return [{"type": sorted(names)}] if names else []


def _negate_values(values: list[Any]) -> list[Any]:
    """Return the schemas of all values that are not in the list."""
    types = {value_type(value) for value in values}
    if types & {"array", "object"}:
        raise NoNegation
    others = TYPES - types - {"integer"}
    alternatives: list[Any] = []
    strings = [value for value in values if isinstance(value, str)]
    if strings:
        try:
            alternatives.append({"type": "string", "pattern": exclude_strings(strings)})
        except UnsupportedPattern:
            raise NoNegation from None
    if types & {"integer", "number"}:
        others -= {"number"}
        numbers = sorted(value for value in values if value_type(value) in ("integer", "number"))
        alternatives.append({"type": "number", "exclusiveMaximum": numbers[0]})
        alternatives += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
            if low < high
        ]
        alternatives.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if "boolean" in types:
        alternatives += [
            {"const": value}
            for value in (True, False)
            if not any(equal_values(value, other) for other in values)
        ]
    return [*alternatives, *_only_types(others)]
