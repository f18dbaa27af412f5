"""Check a JSON schema from an untrusted source, and rewrite it into the form that llguidance.py
compiles.

Annotations are ignored, as JSON Schema says. What constrains a value and cannot be enforced is
named in `CheckedSchema.not_enforced`, or refused where the schema must be followed strictly.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.json_schema.cost import SchemaCost, count_cost
from llmcli.runtime.constraint.json_schema.document import Location, SchemaDocument, format_location
from llmcli.runtime.constraint.json_schema.rewriting import SchemaRewriter, TooLarge
from llmcli.runtime.constraint.json_schema.writer import type_name
from llmcli.strict_json import parse_finite_float, parse_strict_json

# maximum number of characters of a schema, and of levels of nested objects and arrays
MAX_CHARACTERS, MAX_DEPTH = 1 << 18, 64
# When llguidance refuses a schema, at most this many inner schemas are compiled alone to find the
# one that it refuses.
MAX_PARTS = 200
MAX_NAMED = 5  # how many problems an error names
# Keywords of a rewritten schema whose value is a schema, a list of schemas, or an object of
# schemas.
SCHEMA_KEYS = ("items", "additionalProperties")
SCHEMA_LIST_KEYS = ("anyOf", "allOf", "prefixItems")
SCHEMA_TABLE_KEYS = ("properties", "patternProperties", "$defs")
# Keywords whose schemas constrain the same JSON value as the schema that contains the keyword.
SAME_VALUE_KEYS = ("anyOf", "allOf")


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A JSON schema that has passed all checks, in the normal form of rewriting.py.

    - `root`: the rewritten schema.
    - `schemas`: `root` and all schemas inside it, by JSON pointer such as #/items.
    - `origins`: for each of these pointers, that of the original schema.
    - `cost`: of compiling the schema.
    - `not_enforced`: what constrains values but is not enforced, with its location.
    """

    root: Any
    schemas: dict[str, Any]
    origins: dict[str, str]
    cost: SchemaCost
    not_enforced: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the rewritten schema as JSON text."""
        return json.dumps(self.root, ensure_ascii=False)

    def inner_schemas(self) -> Iterator[tuple[str, str]]:
        """Yield the path and the JSON text of each schema inside `root`, the deepest first. A text
        includes all definitions that the schema may refer to.

        The caller compiles each text, so at most MAX_PARTS texts are yielded, with at most
        MAX_CHARACTERS characters together.
        """
        shared = {key: self.root[key] for key in ("$defs",) if key in self.root}
        paths, n_characters = sorted(self.schemas, key=lambda path: -path.count("/")), 0
        for path in paths[:MAX_PARTS]:
            inner = self.schemas[path]
            if path != "#" and isinstance(inner, dict):
                text = json.dumps({**inner, **shared}, ensure_ascii=False)
                n_characters += len(text)
                if n_characters > MAX_CHARACTERS:
                    return
                yield path, text


def check_schema(
    text: str, is_strict: bool = False, closes: bool = True, is_lenient: bool = False
) -> CheckedSchema:
    """Parse, check and rewrite the JSON schema `text`.

    `is_strict`: refuse a schema of which something cannot be enforced. `closes`: close objects that
    list properties and say nothing of additional ones. `is_lenient`: alternatives do not exclude
    one another, and nothing is negated; this is also done where a schema that is not strict would
    otherwise exclude every document.

    Raises UserError when the text is not JSON, when the schema is invalid, too large or too costly
    to compile, and with `is_strict` when a keyword cannot be enforced. The message contains the
    keywords and their paths.
    """
    document = _read_document(text)
    rewriter = SchemaRewriter(document, closes, is_lenient)
    rewritten, is_empty = _rewrite(rewriter)
    if is_empty and not is_strict and not is_lenient:
        rewriter = SchemaRewriter(document, closes, is_lenient=True)
        rewritten, is_empty = _rewrite(rewriter)
    schemas, origins = _list_schemas(rewritten, rewriter.origins)
    if is_empty:
        paths = sorted(schemas, key=lambda path: -path.count("/"))
        is_unsatisfiable = rewriter.prover.is_empty
        path = next((one for one in paths if schemas[one] and is_unsatisfiable(schemas[one])), "#")
        raise UserError(
            f"no document satisfies the schema: it excludes every value at {origins[path]}",
            hint="two of its keywords contradict each other there",
        )
    errors = [*rewriter.errors]
    cycle_path = _find_cycle(schemas)
    if cycle_path is not None:
        errors.append(f"$ref at {origins[cycle_path]} (it refers back to itself)")
    not_enforced = tuple(rewriter.notes)
    problems = [*errors, *not_enforced] if is_strict else errors
    if problems:
        raise UserError(
            f"the schema cannot be enforced: {join_problems(problems)}", hint="leave that out"
        )
    result = CheckedSchema(rewritten, schemas, origins, count_cost(schemas), not_enforced)
    result.cost.check()
    return result


def _read_document(text: str) -> SchemaDocument:
    """Return the parsed schema. Raises UserError when it is no JSON object, nor true."""
    root = _parse(text)
    if isinstance(root, bool):
        if not root:
            raise UserError(
                "the schema is false: no document is valid", hint="{} allows every JSON document"
            )
        root = {}
    if not isinstance(root, dict):
        raise UserError(
            f"the schema is {type_name(root)}",
            hint='a JSON schema is an object: {"type": "object", …}',
        )
    return SchemaDocument(root)


def _rewrite(rewriter: SchemaRewriter) -> tuple[dict[str, Any], bool]:
    """Return the rewritten schema, and whether it certainly excludes every document."""
    try:
        rewritten = rewriter.rewrite_root()
        return rewritten, not rewriter.errors and rewriter.prover.is_empty(rewritten)
    except (TooLarge, RecursionError):
        raise UserError(
            "the schema is too large with its references and alternatives",
            hint="use a smaller schema",
        ) from None


def join_problems(problems: Sequence[str]) -> str:
    """Return the first few problems as one line."""
    more = f" (and {len(problems) - MAX_NAMED} more)" if len(problems) > MAX_NAMED else ""
    return "; ".join(problems[:MAX_NAMED]) + more


def _parse(text: str) -> Any:
    """Return the parsed JSON of a schema's text. Raises UserError when it is not valid JSON, is too
    long, or is nested too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the schema has {len(text)} characters; the limit is {MAX_CHARACTERS}",
            hint="use a smaller schema",
        )
    try:
        root = parse_strict_json(text, _parse_integer)
        json.dumps(root, ensure_ascii=False).encode()
    except RecursionError:
        raise _depth_error() from None
    except UnicodeEncodeError:
        hint = "\\ud800 to \\udfff must come in pairs"
        raise UserError("the schema has half a character in a string", hint=hint) from None
    except ValueError as error:
        hint = '-j takes JSON text, -jf a file: {"type": "object"}'
        raise UserError(f"the schema is not JSON: {error}", hint=hint) from None
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _depth_error()
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return root


def _depth_error() -> UserError:
    """Return the error for a schema with more than MAX_DEPTH levels."""
    return UserError(
        f"the schema is nested more than {MAX_DEPTH} levels deep", hint="name its parts in $defs"
    )


def _parse_integer(word: str) -> int:
    """Return a JSON integer. Raises ValueError when it is beyond the range of a float, because
    llguidance reads integers beyond 64 bits as floats.
    """
    parse_finite_float(word)
    return int(word)


def _list_schemas(
    root: dict[str, Any], locations: dict[int, Location]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a rewritten schema and all schemas inside it by path, and by path the pointer to the
    original of each. `locations`: the location of the original, by the id of a rewritten object. A schema
    without one has that of the schema around it.
    """
    schemas: dict[str, Any] = {}
    origins: dict[str, str] = {}
    stack: list[tuple[str, Any, str]] = [("#", root, "#")]
    while stack:
        path, schema, origin = stack.pop()
        location = locations.get(id(schema))
        if location is not None:
            origin = format_location(location)
        schemas[path], origins[path] = schema, origin
        if isinstance(schema, dict):
            stack += [(f"{path}/{way}", inner, origin) for way, inner in _inner_schemas(schema)]
    return schemas, origins


def _inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a rewritten schema, each with the way to it."""
    for key in SCHEMA_KEYS:
        if key in schema:
            yield key, schema[key]
    for key in SCHEMA_LIST_KEYS:
        for number, inner in enumerate(schema.get(key, ())):
            yield f"{key}/{number}", inner
    for key in SCHEMA_TABLE_KEYS:
        for name, inner in schema.get(key, {}).items():
            yield f"{key}/{name.replace('~', '~0').replace('/', '~1')}", inner


def _find_cycle(schemas: dict[str, Any]) -> str | None:
    """Return the path of a schema that its own references apply again to the same value, or None.
    Such a schema has no end. This is a depth-first search for a cycle, which visits each schema
    once.
    """
    finished, open_paths = set[str](), set[str]()
    for start in schemas:
        stack = [start]
        while stack:
            path = stack[-1]
            if path in open_paths or path in finished:
                open_paths.discard(path)
                finished.add(stack.pop())
                continue
            open_paths.add(path)
            for target in same_value_paths(path, schemas[path]):
                if target in open_paths:
                    return target
                if target not in finished:
                    stack.append(target)
    return None


def same_value_paths(path: str, schema: Any) -> list[str]:
    """Return the paths of the schemas that constrain the same value as the schema at `path`: those
    in its lists, and the target of its $ref.
    """
    if not isinstance(schema, dict):
        return []
    paths = [
        f"{path}/{key}/{number}"
        for key in SAME_VALUE_KEYS
        for number in range(len(schema.get(key, ())))
    ]
    return [*paths, schema["$ref"]] if "$ref" in schema else paths
