"""`SchemaWriter`: one schema that is being rewritten into the normal form of rewriting.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmcli.runtime.constraint.json_schema.document import Location, SchemaDocument
from llmcli.runtime.constraint.json_schema.facts import FactCollector, ValueFacts
from llmcli.runtime.constraint.json_schema.negation import Negator
from llmcli.runtime.constraint.json_schema.overlap import OverlapProver


@dataclass(frozen=True, slots=True)
class Scope:
    """How a schema is rewritten.

    - "sole": it is all that constrains its value, so it is closed.
    - "joint": others constrain the same value. The values inside it are closed, except for the
      properties in `shared`, which others describe, too.
    - "exact": nothing is closed, so that the result allows exactly what the schema allows.
    """

    name: str
    shared: frozenset[str] = frozenset()

    def of_property(self, name: str) -> "Scope":
        """Return the scope of the schema of a property."""
        return EXACT if self.name == "exact" or name in self.shared else SOLE


LATER_KEYS = frozenset({"if", "not"})  # keywords that are written when the schema is finished
SOLE, EXACT = Scope("sole"), Scope("exact")


class Rewriter(Protocol):
    """What a SchemaWriter needs of the rewriter of the whole document."""

    document: SchemaDocument
    facts: FactCollector
    prover: OverlapProver
    negator: Negator
    is_lenient: bool  # nothing is negated

    def rewrite(self, schema: Any, location: Location, scope: Scope) -> Any:
        """Return the schema at a location in the normal form."""
        ...

    def write_exactly(self, schema: Any, location: Location) -> "SchemaDraft":
        """Return the schema at a location with the scope EXACT. It may allow more than the schema."""
        ...

    def finish_exactly(self, draft: "SchemaDraft") -> bool:
        """Finish a draft of write_exactly(). Return whether it allows exactly what the schema
        allows.
        """
        ...

    def do_later(self, action: Callable[[], None]) -> None:
        """Let `action` be done when all schemas that the current one refers to are written."""
        ...

    def reference(self, location: Location, scope: Scope) -> str:
        """Return the value of a $ref to the schema at a location."""
        ...

    def look_up(self, reference: str) -> Any:
        """Return the schema that a $ref of the normal form means, or None."""
        ...

    def note(
        self, thing: str, location: Location, reason: str = "", is_error: bool = False
    ) -> None:
        """Record something that is not enforced, or is an error in the schema."""
        ...


@dataclass(slots=True)
class SchemaDraft:
    """A schema in the normal form. Where it is not finished, it may allow more than it must.

    - `notes`: what the schema does not enforce.
    - `later`: what must be done when all schemas that it refers to are written.
    - `is_open`: it is being finished.
    """

    schema: Any = None
    notes: dict[str, None] = field(default_factory=dict)
    later: list[Callable[[], None]] = field(default_factory=list)
    is_open: bool = False
    is_finished: bool = False


@dataclass(slots=True)
class SchemaAlternatives:
    """A list of alternatives in a rewritten schema, and the location of each in the document.

    `is_exclusive`: exactly one of them must hold, as in oneOf.
    """

    branches: list[Any]
    locations: list[Location]
    key: str
    is_exclusive: bool = False


@dataclass(slots=True)
class SchemaWriter:
    """A schema at a location, and its normal form as far as it is written.

    - `inner_scope`: the scope of the schemas inside it that constrain the same value.
    - `result`: the keywords that are written.
    - `conjuncts`: further schemas that apply to the same value.
    - `unevaluated`: the rewritten schema of unevaluatedProperties, or None.
    """

    rewriter: Rewriter
    schema: dict[str, Any]
    location: Location
    scope: Scope
    inner_scope: Scope
    result: dict[str, Any] = field(default_factory=dict)
    conjuncts: list[Any] = field(default_factory=list)
    alternatives: list[SchemaAlternatives] = field(default_factory=list)
    unevaluated: Any = None

    @property
    def facts(self) -> ValueFacts:
        """What all schemas that constrain the same value say about it."""
        return self.rewriter.facts(self.location)

    def rewrite(self, key: str, *steps: str | int, scope: Scope) -> Any:
        """Return the schema below a keyword in the normal form. `steps`: the way to it from the
        value of the keyword.
        """
        value = self.schema[key]
        for step in steps:
            value = value[step]
        return self.rewriter.rewrite(value, (*self.location, key, *map(str, steps)), scope)

    def note(self, thing: str, reason: str = "") -> None:
        """Record something in this schema that is not enforced."""
        self.rewriter.note(thing, self.location, reason)

    def refuse(self, key: str, value: Any) -> None:
        """Record that the value of a keyword has the wrong type."""
        self.rewriter.note(type_name(value), (*self.location, key), is_error=True)

    @property
    def has_conjuncts(self) -> bool:
        """Whether further schemas apply to the same value, now or when the schema is finished."""
        return bool(self.conjuncts) or not LATER_KEYS.isdisjoint(self.schema)

    def join_conjuncts(self) -> None:
        """Add the conjuncts to the result."""
        if self.conjuncts:
            self.result["allOf"] = [*self.result.get("allOf", ()), *self.conjuncts]
            self.conjuncts = []

    def add(self, keywords: dict[str, Any]) -> None:
        """Add keywords. Those that are written already apply in addition."""
        if self.result.keys().isdisjoint(keywords):
            self.result |= keywords
        else:
            self.conjuncts.append(keywords)


def type_name(value: Any) -> str:
    """Return the JSON type of a value with its article, for error messages."""
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
