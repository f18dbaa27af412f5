"""Reads a JSON schema from an untrusted source, and refuses a schema that could not be enforced.

llguidance.py compiles the checked schema. Every keyword is either supported or refused, with its name and path; none is ignored. Supported is
JSON Schema (draft 2020-12) as far as llguidance enforces it (docs/json_schema.md in its
repository).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.schema_cost import SchemaCost, count_cost
from llmcli.strict_json import parse_finite_float, parse_strict_json

# maximum characters of a schema, and maximum levels of nested JSON
MAX_CHARACTERS, MAX_DEPTH = 1 << 18, 64
# maximum parts of a refused schema that are compiled alone to find the one at fault
MAX_PARTS = 200
# Keywords by the kind of their value: a schema, a list of schemas, an object of schemas.
SCHEMA_KEYS = ("items", "additionalProperties", "additionalItems")
SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_TABLE_KEYS = ("properties", "patternProperties", "$defs", "definitions")
COUNT_KEYS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TYPED_KEYS: dict[str, type | tuple[type, ...]] = {
    "$ref": str,
    "type": (str, list),
    "enum": list,
    "required": list,
    "pattern": str,
    "format": str,
}
ENFORCED_KEYS = {
    *SCHEMA_KEYS,
    *SCHEMA_LIST_KEYS,
    *SCHEMA_TABLE_KEYS,
    *COUNT_KEYS,
    *NUMBER_KEYS,
    *TYPED_KEYS,
    "const",
}
LARGEST_NUMBER = 2**53
# Keywords that describe a value without constraining it. All names that start with x- are treated
# in the same way.
ANNOTATION_KEYS = {
    "$schema",
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "readOnly",
    "writeOnly",
    "deprecated",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
}
FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
# keywords whose schemas constrain the same value as the schema that contains them
SAME_VALUE_KEYS = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A schema that has passed the checks. `schemas`: the schema itself and all schemas inside it,
    by path. `cost`: the cost of compiling it.
    """

    root: Any
    schemas: dict[str, Any]
    cost: SchemaCost

    @property
    def text(self) -> str:
        """Return the schema as JSON, without annotations."""
        return json.dumps(self.root, ensure_ascii=False)

    def inner_schemas(self) -> Iterator[tuple[str, str]]:
        """Yield path and text of the inner schemas, the deepest first. Each text includes the
        definitions that the schema may refer to. All texts together are limited to MAX_CHARACTERS,
        because the caller compiles each.
        """
        shared = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        paths, n_characters = sorted(self.schemas, key=lambda path: -path.count("/")), 0
        for path in paths[:MAX_PARTS]:
            inner = self.schemas[path]
            if path != "#" and isinstance(inner, dict):
                text = json.dumps({**inner, **shared}, ensure_ascii=False)
                n_characters += len(text)
                if n_characters > MAX_CHARACTERS:
                    return
                yield path, text


def check_schema(text: str) -> CheckedSchema:
    """Read and check a schema.

    Raises UserError that names every keyword that cannot be enforced, and its path.
    """
    root = _read(text)
    if isinstance(root, bool):
        if not root:
            raise UserError(
                "the schema is false: no document is valid", hint="{} allows every JSON document"
            )
        root = {}
    if not isinstance(root, dict):
        raise UserError(
            f"the schema is {_kind(root)}", hint='a JSON schema is an object: {"type": "object", …}'
        )
    walk = _Walk(root)
    root = walk.schema(root, "#")
    walk.references()
    if walk.wrong:
        more = f" (and {len(walk.wrong) - 5} more)" if len(walk.wrong) > 5 else ""
        raise UserError(
            f"the schema cannot be enforced: {'; '.join(walk.wrong[:5])}{more}",
            hint="leave that out",
        )
    result = CheckedSchema(root, walk.schemas, count_cost(walk.schemas))
    result.cost.check()
    return result


def _read(text: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the schema has {len(text)} characters; the limit is {MAX_CHARACTERS}",
            hint="use a smaller schema",
        )
    try:
        root = parse_strict_json(text, _whole)
        json.dumps(root, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep() from None
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
            raise _too_deep()
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return root


def _too_deep() -> UserError:
    return UserError(
        f"the schema is nested more than {MAX_DEPTH} levels deep", hint="name its parts in $defs"
    )


def _whole(word: str) -> int:
    # refuses integers beyond the range of floats, because the library reads integers beyond 64 bits
    # as floats
    parse_finite_float(word)
    return int(word)


class _Walk:
    """Checks all schemas of a document. `wrong`: descriptions of what cannot be enforced.
    `schemas`: the schemas by path.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.wrong: list[str] = []
        self.schemas: dict[str, Any] = {}
        # for the path of each schema, the paths of other schemas that constrain the same value
        self._links: dict[str, list[str]] = {}

    def schema(self, value: Any, path: str) -> Any:
        """Check the schema `value`. Return it in the form in which it is passed to the library:
        without annotations, and with counts such as 2.0 as integers.
        """
        if not isinstance(value, dict):
            if not isinstance(value, bool):
                self.wrong.append(f"{_kind(value)} instead of a schema at {path}")
            self.schemas[path] = value
            return value
        cleaned: dict[str, Any] = {}
        links = self._links.setdefault(path, [])
        for key, inner in value.items():
            inner_path = f"{path}/{_escaped(key)}"
            if (
                key in ANNOTATION_KEYS
                or key.startswith("x-")
                or (key == "uniqueItems" and inner is False)
            ):
                if key == "$schema" or (key == "$id" and path == "#"):
                    cleaned[key] = inner
                elif key == "$id":
                    self.wrong.append(f"$id at {path}")
                continue
            if key not in ENFORCED_KEYS:
                self.wrong.append(f"{key} at {path}")
                continue
            if key in SAME_VALUE_KEYS and isinstance(inner, list):
                links += [f"{inner_path}/{number}" for number in range(len(inner))]
            cleaned[key] = self._keyword(key, inner, inner_path)
        self._counted(cleaned, path)
        self.schemas[path] = cleaned
        return cleaned

    def _keyword(self, key: str, value: Any, path: str) -> Any:
        if key in SCHEMA_TABLE_KEYS and isinstance(value, dict):
            return {
                name: self.schema(inner, f"{path}/{_escaped(name)}")
                for name, inner in value.items()
            }
        if (key in SCHEMA_LIST_KEYS or key in SCHEMA_KEYS) and isinstance(value, list):
            return [self.schema(inner, f"{path}/{number}") for number, inner in enumerate(value)]
        if key in SCHEMA_KEYS:
            return self.schema(value, path)
        if key in COUNT_KEYS and isinstance(value, float) and value.is_integer():
            value = int(value)
        if key in SCHEMA_TABLE_KEYS or key in SCHEMA_LIST_KEYS or not _fits(key, value):
            self.wrong.append(f"{_kind(value)} at {path}")
        elif key == "format" and value not in FORMATS:
            self.wrong.append(f"format {json.dumps(value)} at {path.removesuffix('/format')}")
        elif key in ("const", "enum") and not _writable(value):
            self.wrong.append(f"a number beyond 2^53 at {path}")
        return value

    def _counted(self, cleaned: dict[str, Any], path: str) -> None:
        """Refuse a minProperties above the number of required names. An answer may contain a name
        twice, which counts as one property, so it is certain only for required names that they are
        distinct.
        """
        least, required = cleaned.get("minProperties", 0), cleaned.get("required", [])
        if (
            isinstance(least, int)
            and isinstance(required, list)
            and least > max(1, len(set(map(str, required))))
        ):
            self.wrong.append(f"minProperties {least} at {path}")

    def references(self) -> None:
        """Check every $ref. It must be the path of a schema in this document, and following it must
        not lead back to the same schema for the same value.
        """
        for path, schema in list(self.schemas.items()):
            target = schema.get("$ref") if isinstance(schema, dict) else None
            if target is None:
                continue
            if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
                remote = isinstance(target, str) and not target.startswith("#")
                reason = "nothing is fetched" if remote else "only #/… is followed"
                self.wrong.append(f"$ref {json.dumps(target)[:100]} at {path} ({reason})")
            elif target not in self.schemas:
                self.wrong.append(
                    f"$ref {json.dumps(target)[:100]} at {path} (there is no such schema)"
                )
            else:
                self._links[path].append(target)
        if (back := self._returning()) is not None:
            self.wrong.append(f"$ref at {back} (it refers back to itself)")

    def _returning(self) -> str | None:
        """Return the path of a schema that is applied again to the same value by its own
        references, or None. Each schema is visited once.
        """
        finished, open_paths = set[str](), set[str]()
        for start in self._links:
            stack = [start]
            while stack:
                path = stack[-1]
                if path in open_paths or path in finished:
                    open_paths.discard(path)
                    finished.add(stack.pop())
                    continue
                open_paths.add(path)
                for target in self._links.get(path, ()):
                    if target in open_paths:
                        return target
                    if target not in finished:
                        stack.append(target)
        return None


def _fits(key: str, value: Any) -> bool:
    """Return whether the value of a keyword has the right type. The library does not check this for
    all keywords.
    """
    if key in COUNT_KEYS:
        return isinstance(value, int) and not isinstance(value, bool)
    if key in NUMBER_KEYS:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return not (key in TYPED_KEYS and not isinstance(value, TYPED_KEYS[key]))


def _writable(value: Any) -> bool:
    """Return whether all numbers in a value can be written exactly, because the library computes in
    64-bit floats.
    """
    if isinstance(value, (dict, list)):
        return all(map(_writable, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, (int, float)) or abs(value) <= LARGEST_NUMBER


def _escaped(key: str) -> str:
    """Return a key as it is written in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
