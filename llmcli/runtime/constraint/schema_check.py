"""Check a JSON schema from an untrusted source, and refuse it if it cannot be enforced. The checked
schema is compiled in llguidance.py.

No keyword is ignored: a keyword that is not supported is an error with its name and path. Supported
is what llguidance enforces of JSON Schema draft 2020-12 (docs/json_schema.md in its repository).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.schema_cost import SchemaCost, count_cost
from llmcli.strict_json import parse_finite_float, parse_strict_json

# maximum number of characters of a schema, and of levels of nested objects and arrays
MAX_CHARACTERS, MAX_DEPTH = 1 << 18, 64
# When llguidance refuses a schema, at most this many inner schemas are compiled alone to find the
# one that it refuses.
MAX_PARTS = 200
# Keywords whose value is a schema, a list of schemas, or an object of schemas.
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
LARGEST_NUMBER = 2**53  # up to here a 64-bit float represents every integer exactly
# Keywords that describe a value without constraining it. Keywords that start with x- are also
# annotations.
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
# Keywords whose schemas constrain the same JSON value as the schema that contains the keyword.
SAME_VALUE_KEYS = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A JSON schema that has passed all checks. Annotations are removed."""

    root: Any  # the schema as parsed JSON
    schemas: dict[str, Any]  # `root` and all schemas inside it, by JSON pointer such as #/items
    cost: SchemaCost  # of compiling the schema

    @property
    def text(self) -> str:
        """Return the schema as JSON text, without annotations."""
        return json.dumps(self.root, ensure_ascii=False)

    def inner_schemas(self) -> Iterator[tuple[str, str]]:
        """Yield the path and the JSON text of each schema inside `root`, the deepest first. A text
        includes all definitions that the schema may refer to.

        The caller compiles each text, so at most MAX_PARTS texts are yielded, with at most
        MAX_CHARACTERS characters together.
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
    """Parse and check the JSON schema `text`.

    Raises UserError when the text is not JSON, when the schema is too large or too costly to
    compile, or when a keyword cannot be enforced. The message contains the keywords and their
    paths.
    """
    root = _parse(text)
    if isinstance(root, bool):
        if not root:
            raise UserError(
                "the schema is false: no document is valid", hint="{} allows every JSON document"
            )
        root = {}
    if not isinstance(root, dict):
        raise UserError(
            f"the schema is {_type_name(root)}",
            hint='a JSON schema is an object: {"type": "object", …}',
        )
    checker = _SchemaChecker()
    root = checker.check(root, "#")
    checker.check_references()
    if checker.problems:
        more = f" (and {len(checker.problems) - 5} more)" if len(checker.problems) > 5 else ""
        raise UserError(
            f"the schema cannot be enforced: {'; '.join(checker.problems[:5])}{more}",
            hint="leave that out",
        )
    result = CheckedSchema(root, checker.schemas, count_cost(checker.schemas))
    result.cost.check()
    return result


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


class _SchemaChecker:
    """Checks a schema and all schemas inside it, and collects their problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []  # a description of each thing that cannot be enforced
        self.schemas: dict[str, Any] = {}  # the checked schemas by path (JSON pointer)
        # for the path of each schema, the paths of other schemas that constrain the same value
        self._same_value_paths: dict[str, list[str]] = {}

    def check(self, value: Any, path: str) -> Any:
        """Check the schema `value` and all schemas inside it. Return it as llguidance gets it:
        without annotations, and with counts such as 2.0 as integers. Problems are added to
        `problems`, and the schemas to `schemas`. `path`: the JSON pointer of the schema.
        """
        if not isinstance(value, dict):
            if not isinstance(value, bool):
                self.problems.append(f"{_type_name(value)} instead of a schema at {path}")
            self.schemas[path] = value
            return value
        cleaned: dict[str, Any] = {}
        same_value_paths = self._same_value_paths.setdefault(path, [])
        for key, inner in value.items():
            inner_path = f"{path}/{_escape_key(key)}"
            if (
                key in ANNOTATION_KEYS
                or key.startswith("x-")
                or (key == "uniqueItems" and inner is False)
            ):
                if key == "$schema" or (key == "$id" and path == "#"):
                    cleaned[key] = inner
                elif key == "$id":
                    self.problems.append(f"$id at {path}")
                continue
            if key not in ENFORCED_KEYS:
                self.problems.append(f"{key} at {path}")
                continue
            if key in SAME_VALUE_KEYS and isinstance(inner, list):
                same_value_paths += [f"{inner_path}/{number}" for number in range(len(inner))]
            cleaned[key] = self._check_keyword(key, inner, inner_path)
        self._check_min_properties(cleaned, path)
        self.schemas[path] = cleaned
        return cleaned

    def _check_keyword(self, key: str, value: Any, path: str) -> Any:
        """Check the value of a supported keyword, including the schemas in it. Return the value as
        llguidance gets it. `path`: the JSON pointer of the value.
        """
        if key in SCHEMA_TABLE_KEYS and isinstance(value, dict):
            return {
                name: self.check(inner, f"{path}/{_escape_key(name)}")
                for name, inner in value.items()
            }
        if (key in SCHEMA_LIST_KEYS or key in SCHEMA_KEYS) and isinstance(value, list):
            return [self.check(inner, f"{path}/{number}") for number, inner in enumerate(value)]
        if key in SCHEMA_KEYS:
            return self.check(value, path)
        if key in COUNT_KEYS and isinstance(value, float) and value.is_integer():
            value = int(value)
        if key in SCHEMA_TABLE_KEYS or key in SCHEMA_LIST_KEYS or not _has_valid_type(key, value):
            self.problems.append(f"{_type_name(value)} at {path}")
        elif key == "format" and value not in FORMATS:
            self.problems.append(f"format {json.dumps(value)} at {path.removesuffix('/format')}")
        elif key in ("const", "enum") and not _is_exact(value):
            self.problems.append(f"a number beyond 2^53 at {path}")
        return value

    def _check_min_properties(self, cleaned: dict[str, Any], path: str) -> None:
        """Refuse a minProperties that is above 1 and above the number of required names. The
        grammar cannot keep an answer from repeating an optional name, and a repeated name counts as
        one property.
        """
        minimum, required = cleaned.get("minProperties", 0), cleaned.get("required", [])
        if (
            isinstance(minimum, int)
            and isinstance(required, list)
            and minimum > max(1, len(set(map(str, required))))
        ):
            self.problems.append(f"minProperties {minimum} at {path}")

    def check_references(self) -> None:
        """Check the $ref of every schema, after `check`. A $ref must be the path of a schema in
        this document. It must not lead back to the same schema for the same value, because such a
        schema has no end.
        """
        for path, schema in list(self.schemas.items()):
            target = schema.get("$ref") if isinstance(schema, dict) else None
            if target is None:
                continue
            if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
                remote = isinstance(target, str) and not target.startswith("#")
                reason = "nothing is fetched" if remote else "only #/… is followed"
                self.problems.append(f"$ref {json.dumps(target)[:100]} at {path} ({reason})")
            elif target not in self.schemas:
                self.problems.append(
                    f"$ref {json.dumps(target)[:100]} at {path} (there is no such schema)"
                )
            else:
                self._same_value_paths[path].append(target)
        if (cycle_path := self._find_cycle()) is not None:
            self.problems.append(f"$ref at {cycle_path} (it refers back to itself)")

    def _find_cycle(self) -> str | None:
        """Return the path of a schema that its own references apply again to the same value, or
        None. This is a depth-first search for a cycle, which visits each schema once.
        """
        finished, open_paths = set[str](), set[str]()
        for start in self._same_value_paths:
            stack = [start]
            while stack:
                path = stack[-1]
                if path in open_paths or path in finished:
                    open_paths.discard(path)
                    finished.add(stack.pop())
                    continue
                open_paths.add(path)
                for target in self._same_value_paths.get(path, ()):
                    if target in open_paths:
                        return target
                    if target not in finished:
                        stack.append(target)
        return None


def _has_valid_type(key: str, value: Any) -> bool:
    """Return whether the value of a keyword has the type that JSON Schema requires. llguidance does
    not check this for all keywords.
    """
    if key in COUNT_KEYS:
        return isinstance(value, int) and not isinstance(value, bool)
    if key in NUMBER_KEYS:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return not (key in TYPED_KEYS and not isinstance(value, TYPED_KEYS[key]))


def _is_exact(value: Any) -> bool:
    """Return whether all numbers in a JSON value are at most 2^53. llguidance computes in 64-bit
    floats, so it would not enforce larger numbers exactly.
    """
    if isinstance(value, (dict, list)):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, (int, float)) or abs(value) <= LARGEST_NUMBER


def _escape_key(key: str) -> str:
    """Return a key of an object as it is written in a JSON pointer (~0 for ~, ~1 for /)."""
    return key.replace("~", "~0").replace("/", "~1")


def _type_name(value: Any) -> str:
    """Return the JSON type of a value with its article, for error messages."""
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
