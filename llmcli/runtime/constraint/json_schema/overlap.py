"""Prove that no JSON value satisfies two schemas, by types, constants, required properties, bounds
and lengths. The schemas are in the normal form of rewriting.py.

A proof is never wrong. Where none is found, the schemas may still have no value in common.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmcli.runtime.constraint.json_schema.facts import (
    TYPES,
    intersect_types,
    own_types,
    value_type,
)

MAX_LEVELS = 12  # how deep two schemas are compared
MAX_STEPS = 1000  # how many pairs of schemas one proof compares
MAX_TOTAL = 20_000  # and how many all proofs of a document compare
Lookup = Callable[[str], Any]  # returns the schema that a $ref means, or None if it is not known


@dataclass(slots=True)
class Conjunction:
    """A schema as parts that all apply to one value: plain keywords, and lists of alternatives."""

    parts: list[dict[str, Any]] = field(default_factory=list)
    alternatives: list[list[Any]] = field(default_factory=list)
    is_false: bool = False

    @property
    def types(self) -> frozenset[str]:
        """The types that all parts allow."""
        types = TYPES
        for part in self.parts:
            types = intersect_types(types, own_types(part))
        return types

    @property
    def required(self) -> frozenset[str]:
        """The properties that a part requires."""
        return frozenset(name for part in self.parts for name in part.get("required", ()))

    def values(self) -> list[Any] | None:
        """Return the only values of a part with const or enum, or None if there is none."""
        for part in self.parts:
            if "const" in part:
                return [part["const"]]
            if "enum" in part:
                return list(part["enum"])
        return None

    def property_schemas(self, name: str) -> Iterator[Any]:
        """Yield the schemas that the parts have for a property."""
        for part in self.parts:
            properties = part.get("properties", {})
            if name in properties:
                yield properties[name]
            elif "additionalProperties" in part and not part.get("patternProperties"):
                yield part["additionalProperties"]

    def item_schemas(self, index: int) -> Iterator[Any]:
        """Yield the schemas that the parts have for an element of an array."""
        for part in self.parts:
            prefix = part.get("prefixItems", ())
            if index < len(prefix):
                yield prefix[index]
            elif "items" in part:
                yield part["items"]

    def bound(self, low: str, high: str, default: float) -> tuple[float, float]:
        """Return the largest lower and the smallest upper bound of the parts, by the names of the
        keywords. `default`: the lower bound without a keyword.
        """
        return (
            max([part[low] for part in self.parts if low in part], default=default),
            min([part[high] for part in self.parts if high in part], default=math.inf),
        )


class OverlapProver:
    """Proves that schemas have no value in common."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        # the pairs that were compared: for the proof that is being looked for, and for all
        self._n_steps = self._n_total = 0

    def are_disjoint(self, first: Any, second: Any) -> bool:
        """Return whether it is proved that no value satisfies both schemas."""
        self._n_total += self._n_steps
        self._n_steps = MAX_STEPS if self._n_total > MAX_TOTAL else 0
        return self._compare(first, second, MAX_LEVELS)

    def _compare(self, first: Any, second: Any, levels: int) -> bool:
        """Return whether no value satisfies both, as far as `levels` of inner schemas show."""
        self._n_steps += 1
        if levels == 0 or self._n_steps > MAX_STEPS:
            return False
        left, right = self._flatten(first, levels), self._flatten(second, levels)
        if left.is_false or right.is_false:
            return True
        for one, other in ((left, second), (right, first)):
            if any(
                all(self._compare(branch, other, levels - 1) for branch in branches)
                for branches in one.alternatives
            ):
                return True
            values = one.values()
            if values is not None and all(self._rejects(other, value, levels) for value in values):
                return True
        common = intersect_types(left.types, right.types)
        return all(self._are_disjoint_on(name, left, right, levels - 1) for name in common)

    def are_distinct(self, schemas: list[Any]) -> bool:
        """Return whether each schema requires the same property with other constants, as in a
        union with a discriminator. This looks at each schema once.
        """
        conjunctions = [self._flatten(schema, MAX_LEVELS) for schema in schemas]
        names = frozenset.intersection(*(parts.required for parts in conjunctions))
        return any(self._have_distinct_constants(conjunctions, name) for name in names)

    def _have_distinct_constants(self, conjunctions: list[Conjunction], name: str) -> bool:
        """Return whether the constants of a property differ between all schemas."""
        seen = set[str]()
        for parts in conjunctions:
            constants = next(
                (
                    values
                    for schema in parts.property_schemas(name)
                    if (values := self._flatten(schema, MAX_LEVELS).values()) is not None
                ),
                None,
            )
            if constants is None or not all(isinstance(value, str) for value in constants):
                return False
            if not seen.isdisjoint(constants):
                return False
            seen.update(constants)
        return True

    def is_empty(self, schema: Any) -> bool:
        """Return whether it is proved that no value satisfies the schema."""
        return self.are_disjoint(schema, schema)

    def _are_disjoint_on(
        self, type_name: str, left: Conjunction, right: Conjunction, levels: int
    ) -> bool:
        """Return whether no value of this type satisfies both."""
        if type_name == "object":
            return any(
                self._some_disjoint(
                    list(left.property_schemas(name)), list(right.property_schemas(name)), levels
                )
                for name in left.required | right.required
            )
        if type_name == "array":
            low, high = _overlap(left, right, "minItems", "maxItems", 0)
            return low > high or any(
                self._some_disjoint(
                    list(left.item_schemas(index)), list(right.item_schemas(index)), levels
                )
                for index in range(min(int(low), levels))
            )
        if type_name == "string":
            low, high = _overlap(left, right, "minLength", "maxLength", 0)
            return low > high
        if type_name in ("number", "integer"):
            low, high = _overlap(left, right, "minimum", "maximum", -math.inf)
            above, below = _overlap(left, right, "exclusiveMinimum", "exclusiveMaximum", -math.inf)
            return low > high or above >= below or above >= high or low >= below
        return False

    def _some_disjoint(self, first: list[Any], second: list[Any], levels: int) -> bool:
        """Return whether a schema of one list excludes one of the other, or every value."""
        return any(schema is False for schema in (*first, *second)) or any(
            self._compare(one, other, levels) for one in first for other in second
        )

    def _flatten(self, schema: Any, levels: int) -> Conjunction:
        """Return a schema as a conjunction of parts."""
        result = Conjunction()
        stack, remaining = [schema], 4 * levels
        while stack and remaining:
            remaining -= 1
            part = stack.pop()
            if part is False:
                result.is_false = True
            if not isinstance(part, dict):
                continue
            result.parts.append(part)
            stack += part.get("allOf", ())
            if "anyOf" in part:
                result.alternatives.append(part["anyOf"])
            if "$ref" in part:
                stack.append(self._lookup(part["$ref"]))
        return result

    def _rejects(self, schema: Any, value: Any, levels: int) -> bool:
        """Return whether it is certain that a value does not satisfy the schema."""
        self._n_steps += 1
        if schema is False:
            return True
        if not isinstance(schema, dict) or levels == 0 or self._n_steps > MAX_STEPS:
            return False
        inner = levels - 1
        if "$ref" in schema and self._rejects(self._lookup(schema["$ref"]), value, inner):
            return True
        if any(self._rejects(part, value, inner) for part in schema.get("allOf", ())):
            return True
        if "anyOf" in schema and all(self._rejects(part, value, inner) for part in schema["anyOf"]):
            return True
        return self._rejects_plain(schema, value, inner)

    def _rejects_plain(self, schema: dict[str, Any], value: Any, levels: int) -> bool:
        """Return whether the keywords of a schema itself exclude a value."""
        type_name = value_type(value)
        if not intersect_types(frozenset({type_name}), own_types(schema)):
            return True
        if "const" in schema and not equal_values(schema["const"], value):
            return True
        if "enum" in schema and not any(equal_values(other, value) for other in schema["enum"]):
            return True
        if type_name in ("number", "integer"):
            return bool(
                value < schema.get("minimum", -math.inf)
                or value > schema.get("maximum", math.inf)
                or value <= schema.get("exclusiveMinimum", -math.inf)
                or value >= schema.get("exclusiveMaximum", math.inf)
            )
        if type_name == "string":
            low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
            return not low <= len(value) <= high
        if type_name == "object":
            parts = Conjunction([schema])
            return any(name not in value for name in schema.get("required", ())) or any(
                self._rejects(inner, element, levels)
                for name, element in value.items()
                for inner in parts.property_schemas(name)
            )
        if type_name == "array":
            low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
            return not low <= len(value) <= high
        return False


def equal_values(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal. Python takes 1 and true for equal."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal_values, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            equal_values(first[key], second[key]) for key in first
        )
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def _overlap(
    left: Conjunction, right: Conjunction, low: str, high: str, default: float
) -> tuple[float, float]:
    """Return the bounds of a value that satisfies both."""
    first, second = left.bound(low, high, default), right.bound(low, high, default)
    return max(first[0], second[0]), min(first[1], second[1])
