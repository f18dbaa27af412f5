"""What compiling a schema takes, counted before it is begun. Where the work grows faster than the
text it has an end.

llguidance 1.9.1 on one core, 2026-11-22, seconds of its process: properties that may all be left
out take the square of their number (2,000: 0.48, 4,000: 1.8, 6,000: 3.7), names that must be there
as well (20,000: 4.1), patternProperties of one object the cube (100: 0.06, 200: 0.6, 400: 15),
multipleOf as many states as it has steps (10,007: 0.05, 100,003: 0.36, 1,000,003: 7.8),
alternatives of it the product of theirs (nine of 10,000: minutes), a format 0.0004 each.
Repetitions (minItems, maxLength, …) cost nothing, whatever their number.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from llmcli.errors import UserError

CHAIN = 5_000_000  # properties in a row that may be left out, times all schemas
MOST = {
    "properties": 6_000,
    "required": 6_000,
    "patterns": 1_000,
    "merged": 400,
    "steps": 20_000,
    "siblings": 100,
    "literal": 16_000,
}
WORDS = {
    "properties": "properties",
    "required": "required names",
    "patterns": "patterns and formats",
    "merged": "references that are merged with what stands beside them",
    "steps": "steps to tell apart (multipleOf)",
    "siblings": "patternProperties in one object",
    "literal": "characters in one const, enum or name",
}


@dataclass(frozen=True, slots=True)
class Size:
    """Counts of one or several schemas; `chain` is the longest row of properties that may be left
    out, with those that are merged into it.
    """

    counts: Mapping[str, int]
    schemas: int
    chain: int

    def __add__(self, other: "Size") -> "Size":
        """Of both in one grammar."""
        largest = ("siblings", "literal")
        counts = {
            name: max(count, other.counts[name]) if name in largest else count + other.counts[name]
            for name, count in self.counts.items()
        }
        return Size(counts, self.schemas + other.schemas, max(self.chain, other.chain))

    def check(self) -> None:
        """Raise UserError where compiling would take too long, and say of what there is too much."""
        for name, count in self.counts.items():
            if count > MOST[name]:
                what = f"the schema has {count:,} {WORDS[name]}, at most {MOST[name]:,} are taken"
                raise UserError(what, hint="ask for less at once")
        if self.chain * self.schemas > CHAIN:
            what = f"the schema has {self.chain:,} properties in a row that may be left out in {self.schemas:,} schemas"
            most = f"at most {CHAIN // self.schemas:,} are taken beside so many; name in `required` what must be there"
            raise UserError(what, hint=most)


NOTHING = Size(dict.fromkeys(MOST, 0), 0, 0)


def size(schemas: Mapping[str, Any]) -> Size:
    """Of all schemas of a document, by place; none may hold itself in place."""
    counts, chains, steps = dict.fromkeys(MOST, 0), dict[str, int](), dict[str, int]()
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
    return Size(
        counts, len(schemas), max(_together(schemas, chains, ("allOf",), sum).values(), default=0)
    )


def _counted(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, int]]:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    names = (
        [*properties, *patterns]
        if isinstance(properties, dict) and isinstance(patterns, dict)
        else []
    )
    literals = [len(str(one)) for one in (*names, schema.get("const", ""), *_list(schema, "enum"))]
    yield "properties", len(names)
    yield "required", len(_list(schema, "required"))
    yield "patterns", len(names) - len(properties) + ("pattern" in schema) + ("format" in schema)
    yield "siblings", len(names) - len(properties)
    yield "literal", max(literals)
    if "$ref" in schema and (len(schema) > 1 or path.rpartition("/")[0].endswith("/allOf")):
        yield "merged", 1


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _row(schema: dict[str, Any]) -> int:
    """The properties at an object's end that may be left out."""
    properties, needed = schema.get("properties"), set(map(str, _list(schema, "required")))
    if not isinstance(properties, dict):
        return 0
    return next(
        (at for at, name in enumerate(reversed(properties)) if name in needed), len(properties)
    )


def _steps(schema: dict[str, Any]) -> int:
    """The remainders that a number's digits may have on their way."""
    step = schema.get("multipleOf")
    if not isinstance(step, int | float):
        return 1
    return max(1, int("".join(map(str, Decimal(repr(step)).normalize().as_tuple().digits))))


def _together(
    schemas: Mapping[str, Any],
    own: dict[str, int],
    kinds: tuple[str, ...],
    join: Callable[[list[int]], int],
) -> dict[str, int]:
    """Each schema's count joined with those of its `kinds` and of what it refers to: they are about
    the same value.
    """
    total: dict[str, int] = {}
    for start in own:
        ahead = [start]
        while ahead:
            path = ahead[-1]
            merged = [one for one in _merged(path, schemas[path], kinds) if one in own]
            todo = [one for one in merged if one not in total]
            if todo and path not in total:
                ahead += todo
                continue
            ahead.pop()
            if path not in total:
                total[path] = min(CHAIN, join([own[path], *(total[one] for one in merged)]))
    return total


def _merged(path: str, schema: dict[str, Any], kinds: tuple[str, ...]) -> list[str]:
    found = [
        f"{path}/{kind}/{number}" for kind in kinds for number in range(len(_list(schema, kind)))
    ]
    return [*found, schema["$ref"]] if isinstance(schema.get("$ref"), str) else found
