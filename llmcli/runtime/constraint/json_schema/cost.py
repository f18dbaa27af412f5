"""The cost of compiling a JSON schema with llguidance. It is computed before compiling, so that a
schema from an untrusted source that would take too long is refused.

The time of compiling grows with the square of the number of optional properties and of required
names, with the cube of the number of patternProperties in one object, and with the values of
multipleOf, multiplied over alternatives. Each format adds a constant time. Repetitions (minItems,
maxLength, …) cost nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from llmcli.errors import UserError

# limit of the number of consecutive optional properties, multiplied by the number of schemas
MAX_CHAIN = 5_000_000
MAX_COUNTS = {
    "properties": 6_000,
    "required": 6_000,
    "patterns": 1_000,
    "merged": 400,
    "steps": 20_000,
    "siblings": 100,
    "literal": 16_000,
}
# The largest of these counts matters; the others are added up over all schemas.
MAXIMUM_COUNTS = ("siblings", "literal")
COUNT_NAMES = {  # the counts in error messages
    "properties": "properties",
    "required": "required names",
    "patterns": "patterns and formats",
    "merged": "references merged with other keywords",
    "steps": "distinct steps (multipleOf)",
    "siblings": "patternProperties in one object",
    "literal": "characters in one const, enum or name",
}


@dataclass(frozen=True, slots=True)
class SchemaCost:
    """The counts that determine how long compiling takes, for one or several JSON documents."""

    counts: Mapping[str, int]  # by the names of MAX_COUNTS
    n_schemas: int  # number of schemas, including all nested ones
    # Largest number of consecutive optional properties of an object. The properties of all schemas
    # that allOf or $ref merges into the same object are added up.
    longest_chain: int

    def __add__(self, other: "SchemaCost") -> "SchemaCost":
        """Return the cost of one grammar that contains the schemas of both."""
        counts = {
            name: max(count, other.counts[name])
            if name in MAXIMUM_COUNTS
            else count + other.counts[name]
            for name, count in self.counts.items()
        }
        return SchemaCost(
            counts, self.n_schemas + other.n_schemas, max(self.longest_chain, other.longest_chain)
        )

    def check(self) -> None:
        """Raise UserError when a count is above its limit, because compiling would take too long.
        The message contains the count and the limit.
        """
        for name, count in self.counts.items():
            if count > MAX_COUNTS[name]:
                raise UserError(
                    f"the schema has {count:,} {COUNT_NAMES[name]}; the limit is {MAX_COUNTS[name]:,}",
                    hint="use a smaller schema",
                )
        if self.longest_chain * self.n_schemas > MAX_CHAIN:
            raise UserError(
                f"the schema has {self.longest_chain:,} properties in a row that may be left out "
                f"in {self.n_schemas:,} schemas; the limit is {MAX_CHAIN // self.n_schemas:,}",
                hint="list the properties that must be present in `required`",
            )


NO_COST = SchemaCost(dict.fromkeys(MAX_COUNTS, 0), 0, 0)


def count_cost(schemas: Mapping[str, Any]) -> SchemaCost:
    """Return the cost of all schemas of a document together.

    `schemas`: the document's schema and all schemas inside it, by JSON pointer. They must have
    passed the check for references that lead back to the same schema (check.py).
    """
    counts, chains, steps = dict.fromkeys(MAX_COUNTS, 0), dict[str, int](), dict[str, int]()
    for path, schema in schemas.items():
        if not isinstance(schema, dict):
            continue
        chains[path] = _count_final_optional(schema)
        steps[path] = count_remainders(schema["multipleOf"]) if "multipleOf" in schema else 1
        for name, count in _count_keywords(path, schema):
            counts[name] = (
                max(counts[name], count) if name in MAXIMUM_COUNTS else counts[name] + count
            )
    products = _combine_for_same_value(schemas, steps, ("allOf", "anyOf", "oneOf"), math.prod)
    counts["steps"] = sum(count - 1 for count in products.values())
    return SchemaCost(
        counts,
        len(schemas),
        max(_combine_for_same_value(schemas, chains, ("allOf",), sum).values(), default=0),
    )


def _count_keywords(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the name and the value of each count of a single schema, without the schemas inside it.
    `path`: the JSON pointer of the schema.
    """
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    names = (
        [*properties, *patterns]
        if isinstance(properties, dict) and isinstance(patterns, dict)
        else []
    )
    literals = [
        len(str(literal))
        for literal in (*names, schema.get("const", ""), *_list_value(schema, "enum"))
    ]
    yield "properties", len(names)
    yield "required", len(_list_value(schema, "required"))
    yield "patterns", len(names) - len(properties) + ("pattern" in schema) + ("format" in schema)
    yield "siblings", len(names) - len(properties)
    yield "literal", max(literals)
    if "$ref" in schema and (len(schema) > 1 or path.rpartition("/")[0].endswith("/allOf")):
        yield "merged", 1


def _list_value(schema: dict[str, Any], key: str) -> list[Any]:
    """Return the list under `key`, or an empty list when there is no list."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _count_final_optional(schema: dict[str, Any]) -> int:
    """Return the number of optional properties after the last required property of a schema."""
    properties, required = schema.get("properties"), set(map(str, _list_value(schema, "required")))
    if not isinstance(properties, dict):
        return 0
    return next(
        (count for count, name in enumerate(reversed(properties)) if name in required),
        len(properties),
    )


def count_remainders(step: float) -> int:
    """Return how many remainders the grammar of multipleOf distinguishes: the divisor's significant
    digits as an integer, so 25 for 0.25.
    """
    return max(1, int("".join(map(str, Decimal(repr(step)).normalize().as_tuple().digits))))


def _combine_for_same_value(
    schemas: Mapping[str, Any],
    counts: dict[str, int],
    keywords: tuple[str, ...],
    combine: Callable[[list[int]], int],
) -> dict[str, int]:
    """Return for each schema, by path, its count combined with the counts of the schemas that
    constrain the same value. These are the schemas in the lists under `keywords` (such as allOf)
    and the target of its $ref, and so on for those schemas.

    `counts`: the count of each schema by path. `combine`: math.prod or sum.
    """
    combined: dict[str, int] = {}
    for start in counts:
        stack = [start]
        while stack:
            path = stack[-1]
            inner_paths = [
                inner
                for inner in _same_value_paths(path, schemas[path], keywords)
                if inner in counts
            ]
            missing = [inner for inner in inner_paths if inner not in combined]
            if missing and path not in combined:
                stack += missing
                continue
            stack.pop()
            if path not in combined:
                combined[path] = min(
                    MAX_CHAIN, combine([counts[path], *(combined[inner] for inner in inner_paths)])
                )
    return combined


def _same_value_paths(path: str, schema: dict[str, Any], keywords: tuple[str, ...]) -> list[str]:
    """Return the paths of the schemas in the lists under `keywords`, and of the target of $ref."""
    paths = [
        f"{path}/{keyword}/{number}"
        for keyword in keywords
        for number in range(len(_list_value(schema, keyword)))
    ]
    return [*paths, schema["$ref"]] if isinstance(schema.get("$ref"), str) else paths
