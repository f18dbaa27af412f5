"""Rewrite JSON schemas into a normal form that llguidance enforces.

The normal form has only the keywords that llguidance knows, references to `$defs` of the root, and
no annotations. Every document that fits the normal form is valid against the schema, except for
what the notes name.

- A schema that is all that constrains its value is closed: if it lists properties and says nothing
  of additional ones, there are none. llama.cpp's converter does the same, because small models
  invent names without end. A schema that is one part of several (allOf, a $ref with other keywords)
  stays open, and the parts together are closed.
- A schema with keywords of one type, but without `type`, is about values of that type.
- Conditions, negations and dependencies become alternatives. oneOf becomes anyOf where no document
  fits two of its alternatives.
- OpenAPI's `nullable` allows null, and its `discriminator` gives each alternative its name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from llmcli.runtime.constraint.json_schema import logic, objects_and_arrays, scalars
from llmcli.runtime.constraint.json_schema.document import Location, SchemaDocument, format_location
from llmcli.runtime.constraint.json_schema.facts import TYPES, FactCollector
from llmcli.runtime.constraint.json_schema.negation import Negator
from llmcli.runtime.constraint.json_schema.overlap import OverlapProver
from llmcli.runtime.constraint.json_schema.writer import (
    EXACT,
    SOLE,
    SchemaDraft,
    SchemaWriter,
    Scope,
    type_name,
)

KEYWORDS = {
    **scalars.KEYWORDS,
    **objects_and_arrays.KEYWORDS,
    **logic.KEYWORDS,
}
# Where only one of these keywords constrains a value, the schemas in it are all that does.
SINGLE_KEYS = ("$ref", "anyOf", "oneOf", "allOf")
# Keywords that the functions of other keywords read.
READ_WITH_OTHERS = frozenset(
    {"then", "else", "additionalItems", "minContains", "maxContains", "nullable", "discriminator"}
)
MAX_SCHEMAS = 60_000  # maximum number of schemas that a rewritten schema consists of
# Keywords for which some schemas apply only to some values.
CONDITIONAL_KEYS = frozenset({"if", "dependentSchemas", "dependencies"})
# Annotations that look like keywords.
KNOWN_ANNOTATIONS = frozenset({"readOnly", "writeOnly", "definitions", "requires", "constant"})
MAX_VISITS = 100_000  # how many schemas are looked through to finish others
MAX_LEVELS = 12  # how many schemas are finished inside one another


class TooLarge(ValueError):
    """Raised when a rewritten schema would have more than MAX_SCHEMAS schemas."""


class SchemaRewriter:
    """Rewrites one document. `notes`, `errors` and `origins` are complete after rewrite_root().

    - `notes`: what the rewritten schema does not enforce.
    - `errors`: what is wrong in the schema.
    - `origins`: the location of each rewritten object in the document, by the id of the object.
    """

    def __init__(
        self, document: SchemaDocument, closes: bool = True, is_lenient: bool = False
    ) -> None:
        """`closes`: whether schemas that list properties are closed. `is_lenient`: alternatives do
        not exclude one another, and nothing is negated.
        """
        self.document, self._closes, self.is_lenient = document, closes, is_lenient
        self.facts = FactCollector(document)
        self.prover, self.negator = OverlapProver(self.look_up), Negator(self.look_up)
        self.notes: dict[str, None] = {}
        self.errors: dict[str, None] = {}
        self.origins: dict[int, Location] = {}
        self._locations: list[tuple[Location, Scope]] = []  # of the definitions, by their number
        self._numbers: dict[tuple[Location, Scope], int] = {}
        self._definitions: dict[int, SchemaDraft] = {}
        self._draft = SchemaDraft()  # the schema that is being written
        self._levels = self._n_schemas = self._n_visits = 0

    def rewrite_root(self) -> dict[str, Any]:
        """Return the rewritten schema, with its definitions. Raises TooLarge."""
        root = self._write(self.document.root, (), SOLE if self._closes else EXACT)
        numbers: dict[int, None] = {}  # of the definitions that the root needs
        stack = [root]
        while stack:
            draft = stack.pop()
            self._finish(draft)
            self.notes |= draft.notes
            for number in self._references(draft.schema):
                if number not in numbers:
                    numbers[number] = None
                    stack.append(self._define(number))
        schema = root.schema
        if not isinstance(schema, dict):
            schema = {} if schema else {"enum": []}
        if numbers:
            definitions = {str(key): self._definitions[key].schema for key in sorted(numbers)}
            schema = {**schema, "$defs": definitions}
        return schema

    def _references(self, schema: Any) -> set[int]:
        """Return the numbers of the definitions that a rewritten schema itself refers to."""
        numbers, stack = set[int](), [schema]
        while stack:
            value = stack.pop()
            if isinstance(value, list):
                stack += value
            elif isinstance(value, dict):
                self._n_visits += 1
                if isinstance(reference := value.get("$ref"), str):
                    numbers.add(int(reference.rpartition("/")[2]))
                stack += [inner for key, inner in value.items() if key not in ("const", "enum")]
        return numbers

    def look_up(self, reference: str) -> Any:
        """Return the schema that a reference of the normal form means. Return None, which stands
        for any value, while it is being written.
        """
        return self._define(int(reference.rpartition("/")[2])).schema

    def _define(self, number: int) -> SchemaDraft:
        """Return a definition, which may not be finished."""
        if number not in self._definitions:
            self._definitions[number] = SchemaDraft()  # while it is being written
            location, scope = self._locations[number]
            self._definitions[number] = self._write(self.document.value(location), location, scope)
        return self._definitions[number]

    def _write(self, schema: Any, location: Location, scope: Scope) -> SchemaDraft:
        """Return the schema at a location in the normal form, except for what must be done later."""
        draft = SchemaDraft()
        with self._writing(draft):
            draft.schema = self.rewrite(schema, location, scope)
        return draft

    @contextmanager
    def _writing(self, draft: SchemaDraft) -> Iterator[None]:
        """Let notes and later work belong to `draft`."""
        before, self._draft = self._draft, draft
        try:
            yield
        finally:
            self._draft = before

    def _finish(self, draft: SchemaDraft) -> None:
        """Do the work on a schema that must be done when all definitions are written."""
        draft.is_open = True
        with self._writing(draft):
            while draft.later:
                draft.later.pop(0)()
        draft.is_open, draft.is_finished = False, True

    def do_later(self, action: Callable[[], None]) -> None:
        """Let `action` be done when all schemas that the current one refers to are written."""
        self._draft.later.append(action)

    def reference(self, location: Location, scope: Scope) -> str:
        """Return the value of a $ref to the schema at a location."""
        if not self._closes:
            scope = EXACT
        if (location, scope) not in self._numbers:
            self._numbers[location, scope] = len(self._locations)
            self._locations.append((location, scope))
        return f"#/$defs/{self._numbers[location, scope]}"

    def note(
        self, thing: str, location: Location, reason: str = "", is_error: bool = False
    ) -> None:
        """Record something that is not enforced, or an error in the schema."""
        text = f"{thing} at {format_location(location)}" + (f" ({reason})" if reason else "")
        (self.errors if is_error else self._draft.notes)[text] = None

    def write_exactly(self, schema: Any, location: Location) -> SchemaDraft:
        """Return the schema at a location with the scope EXACT. Nothing is noted in the current
        schema. The result may allow more than the schema, until `finish_exactly` finishes it.
        """
        return self._write(schema, location, EXACT)

    def finish_exactly(self, draft: SchemaDraft) -> bool:
        """Finish a draft of write_exactly(). Return whether it allows exactly what the schema
        allows.
        """
        if self._levels == MAX_LEVELS or self._n_visits > MAX_VISITS:
            return False
        self._levels += 1
        try:
            return self._finish_exactly(draft)
        finally:
            self._levels -= 1

    def _finish_exactly(self, draft: SchemaDraft) -> bool:
        """Finish a draft and the definitions that it needs, like finish_exactly()."""
        seen, stack = set[int](), [draft]
        while stack:
            inner = stack.pop()
            if not inner.is_finished:
                if inner.is_open:
                    return False  # it is being finished, and needs itself
                self._finish(inner)
            if inner.notes:
                return False
            for number in self._references(inner.schema) - seen:
                seen.add(number)
                stack.append(self._define(number))
        return True

    def rewrite(self, schema: Any, location: Location, scope: Scope) -> Any:
        """Return the schema at a location in the normal form."""
        if not self._closes:
            scope = EXACT
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.note(f"{type_name(schema)} instead of a schema", location, is_error=True)
            return True
        self._n_schemas += 1
        if self._n_schemas > MAX_SCHEMAS:
            raise TooLarge
        keys = KEYWORDS.keys() & schema.keys()
        inner_scope = self._inner_scope(schema, location, scope, keys)
        writer = SchemaWriter(self, schema, location, scope, inner_scope)
        for key, value in schema.items():
            if key in KEYWORDS:
                KEYWORDS[key](writer, value)
            elif key not in READ_WITH_OTHERS:
                self._check_spelling(key, location)
        return self._complete(writer)

    def _inner_scope(
        self, schema: dict[str, Any], location: Location, scope: Scope, keys: set[str]
    ) -> Scope:
        """Return the scope of the schemas inside a schema that constrain the same value."""
        if scope != SOLE:
            return scope
        others = keys - {"type"}
        if len(others) == 1 and (key := next(iter(others))) in SINGLE_KEYS:
            branches = schema[key]
            if key != "allOf" or (isinstance(branches, list) and len(branches) == 1):
                return SOLE
        return Scope("joint", self.facts(location).shared_names)

    def _complete(self, writer: SchemaWriter) -> Any:
        """Return the schema of a writer after all its keywords are written."""
        result, is_sole = writer.result, writer.scope == SOLE != writer.inner_scope
        if writer.unevaluated is not None:
            self._exclude_unevaluated(writer)
        if is_sole:
            self._close(writer)
        objects_and_arrays.choose_properties(writer)
        if is_sole:
            self._infer_type(writer)
        writer.join_conjuncts()
        if any(alternatives.is_exclusive for alternatives in writer.alternatives):
            self.do_later(partial(logic.resolve_exclusive, writer))
        if writer.schema.get("nullable") is True:
            result = {"anyOf": [result, {"type": "null"}]}
        self.origins[id(result)] = writer.location
        return result

    def _close(self, writer: SchemaWriter) -> None:
        """Forbid properties that are not described, in a schema that is all that constrains its
        value. Where it has one list of alternatives, each is closed by itself.
        """
        facts, result = writer.facts, writer.result
        if "object" not in facts.types or {"const", "enum"} & result.keys():
            return
        base = self.facts.base(writer.location)
        is_plain = not {"$ref", "allOf", "anyOf"} & result.keys() and not writer.has_conjuncts
        if len(writer.alternatives) == 1 and CONDITIONAL_KEYS.isdisjoint(writer.schema):
            logic.close_alternatives(writer, base)
        elif not facts.must_close:
            return
        elif is_plain:
            closed = objects_and_arrays.close_object(facts)
            result["properties"] = closed["properties"] | result.get("properties", {})
            result["additionalProperties"] = False
        else:
            writer.conjuncts.append(objects_and_arrays.close_object(facts))

    def _exclude_unevaluated(self, writer: SchemaWriter) -> None:
        """Apply unevaluatedProperties to the properties that no schema for the value describes, if
        it is certain which these are.
        """
        base = self.facts.base(writer.location)
        if base.opens or "additionalProperties" in writer.schema:
            return
        branches = [
            self.facts(location) for group in writer.alternatives for location in group.locations
        ]
        if (
            len(writer.alternatives) > 1
            or not CONDITIONAL_KEYS.isdisjoint(writer.schema)
            or any(facts.has_alternatives for facts in (base, *branches))
        ):
            writer.note("unevaluatedProperties")
        elif writer.alternatives:
            logic.close_alternatives(writer, base, writer.unevaluated)
        elif {"$ref", "allOf"} & writer.result.keys() or writer.has_conjuncts:
            writer.conjuncts.append(
                objects_and_arrays.close_object(base, writer.unevaluated, with_required=False)
            )
        else:
            writer.result["additionalProperties"] = writer.unevaluated

    def _infer_type(self, writer: SchemaWriter) -> None:
        """Add the type to a schema whose keywords are all about values of one type."""
        facts = writer.facts
        if facts.types == TYPES and len(facts.families) == 1:
            writer.result["type"] = next(iter(facts.families))

    def _check_spelling(self, key: str, location: Location) -> None:
        """Note a keyword that looks like a typing error of one that constrains values."""
        if key in KNOWN_ANNOTATIONS or key.startswith(("x-", "_", "$")):
            return
        for known in KEYWORDS:
            is_near = len(key) > 6 and _differ_by_one(key, known)
            if key != known and (is_near or key.lower() == known.lower()):
                self.note(f"{key}", location, f"no keyword; {known} is one")
                return


def _differ_by_one(first: str, second: str) -> bool:
    """Return whether two words differ by one letter that is added, missing or wrong, or by two
    letters that are exchanged. An s at the end makes another word.
    """
    if abs(len(first) - len(second)) > 1 or first.rstrip("s") == second.rstrip("s"):
        return False
    shared = next(
        (
            index
            for index, (one, other) in enumerate(zip(first, second, strict=False))
            if one != other
        ),
        min(len(first), len(second)),
    )
    one, other = first[shared:], second[shared:]
    return (
        one[1:] == other
        or one == other[1:]
        or one[1:] == other[1:]
        or (one[:2] == other[1::-1] and one[2:] == other[2:])
    )
