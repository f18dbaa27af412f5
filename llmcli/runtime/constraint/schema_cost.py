"""The cost of compiling a JSON schema. It is counted before compiling, with limits for everything
that makes compiling slow.

In llguidance the time grows with the square of the number of optional properties and of required
names, with the cube of the number of patternProperties in an object, with the size of the steps of
multipleOf, and with the product of these steps over alternatives. Each format adds a constant.
Repetitions (minItems, maxLength, …) cost nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from llmcli.errors import UserError

# the limit of optional properties in a row, multiplied by the number of schemas
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
COUNT_NAMES = {
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
    """The counts that determine the cost of one or several schemas. `longest_chain`: the largest
    number of consecutive optional properties, including those of schemas that are merged into the
    same object.
    """

    counts: Mapping[str, int]
    n_schemas: int
    longest_chain: int

    def __add__(self, other: "SchemaCost") -> "SchemaCost":
        """Return the cost of a grammar that contains both."""
        largest = ("siblings", "literal")
        counts = {
            name: max(count, other.counts[name]) if name in largest else count + other.counts[name]
            for name, count in self.counts.items()
        }
        return SchemaCost(
            counts, self.n_schemas + other.n_schemas, max(self.longest_chain, other.longest_chain)
        )

    def check(self) -> None:
        """Raise UserError when compiling would take too long. The message names the count that is
        too large.
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
    """Return the cost of all schemas of a document. `schemas`: the schemas by path. No schema may
    be applied again to the same value by its own references.
    """
    counts, chains, steps = dict.fromkeys(MAX_COUNTS, 0), dict[str, int](), dict[str, int]()
    for path, schema in schemas.items():
        if not isinstance(schema, dict):
            continue
        chains[path], steps[path] = _row(schema), _steps(schema)
        for name, count in _counted(path, schema):
            counts[name] = (
                max(counts[name], count)
                if name in ("siblings", "literal")
                else counts[name] + count
            )
    products = _together(schemas, steps, ("allOf", "anyOf", "oneOf"), math.prod)
    counts["steps"] = sum(count - 1 for count in products.values())
    return SchemaCost(
        counts, len(schemas), max(_together(schemas, chains, ("allOf",), sum).values(), default=0)
    )


def _counted(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, int]]:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    names = (
        [*properties, *patterns]
        if isinstance(properties, dict) and isinstance(patterns, dict)
        else []
    )
    literals = [
        len(str(literal)) for literal in (*names, schema.get("const", ""), *_list(schema, "enum"))
    ]
    yield "properties", len(names)
    yield "required", len(_list(schema, "required"))
    yield "patterns", len(names) - len(properties) + ("pattern" in schema) + ("format" in schema)
    yield "siblings", len(names) - len(properties)
    yield "literal", max(literals)
    if "$ref" in schema and (len(schema) > 1 or path.rpartition("/")[0].endswith("/allOf")):
        yield "merged", 1


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _row(schema: dict[str, Any]) -> int:
    """Return the number of consecutive optional properties at the end of an object."""
    properties, needed = schema.get("properties"), set(map(str, _list(schema, "required")))
    if not isinstance(properties, dict):
        return 0
    return next(
        (at for at, name in enumerate(reversed(properties)) if name in needed), len(properties)
    )


def _steps(schema: dict[str, Any]) -> int:
    """Return the number of remainders that must be distinguished for multipleOf; 1 without it."""
    step = schema.get("multipleOf")
    if not isinstance(step, int | float):
        return 1
    return max(1, int("".join(map(str, Decimal(repr(step)).normalize().as_tuple().digits))))


def _together(
    schemas: Mapping[str, Any],
    counts: dict[str, int],
    kinds: tuple[str, ...],
    join: Callable[[list[int]], int],
) -> dict[str, int]:
    """Return for each schema its count joined with those of the schemas that constrain the same
    value: the schemas in its `kinds`, and the one that it refers to. `join`: combines counts.
    """
    total: dict[str, int] = {}
    for start in counts:
        stack = [start]
        while stack:
            path = stack[-1]
            merged = [inner for inner in _merged(path, schemas[path], kinds) if inner in counts]
            todo = [inner for inner in merged if inner not in total]
            if todo and path not in total:
                stack += todo
                continue
            stack.pop()
            if path not in total:
                total[path] = min(
                    MAX_CHAIN, join([counts[path], *(total[inner] for inner in merged)])
                )
    return total


def _merged(path: str, schema: dict[str, Any], kinds: tuple[str, ...]) -> list[str]:
    paths = [
        f"{path}/{kind}/{number}" for kind in kinds for number in range(len(_list(schema, kind)))
    ]
    return [*paths, schema["$ref"]] if isinstance(schema.get("$ref"), str) else paths
