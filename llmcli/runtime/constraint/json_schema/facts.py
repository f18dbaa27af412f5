"""What all schemas that constrain the same JSON value say about it together: the schema itself, and
those that it reaches through $ref, allOf, anyOf, oneOf and conditions.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.runtime.constraint.json_schema.document import Location, SchemaDocument

TYPES = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
# Keywords by the type of the values that they constrain.
FAMILIES: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {
            "properties",
            "patternProperties",
            "additionalProperties",
            "unevaluatedProperties",
            "required",
            "minProperties",
            "maxProperties",
            "propertyNames",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
        }
    ),
    "array": frozenset(
        {
            "items",
            "prefixItems",
            "additionalItems",
            "unevaluatedItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
        }
    ),
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
}
MAX_LEVELS = 80  # through how many references and lists facts are collected
# The keywords that describe the elements of an array. They count as one name.
ITEM_KEYS = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems"})
ITEMS_NAME = "\0items"
# The properties that no name describes.
OTHERS_NAME = "\0others"


@dataclass(slots=True)
class ValueFacts:
    """What several schemas say about one value.

    - `names`: the properties that they describe or require, in order. The number is how many of the
      schemas that apply together describe the property; 0 if it is only required.
    - `n_descriptions`: how many of the schemas that apply together describe properties.
    - `patterns`: the keys of patternProperties.
    - `lists_properties`: whether a schema has properties or patternProperties.
    - `opens`, `closes`: whether a schema allows, or forbids, properties that are not described.
    - `has_unevaluated`: whether a schema has unevaluatedProperties.
    - `has_alternatives`: whether a schema has alternatives, conditions or dependencies.
    - `families`: the types that its keywords are about.
    - `types`: the types that the value can have.
    """

    names: dict[str, int] = field(default_factory=dict)
    n_descriptions: int = 0
    patterns: dict[str, None] = field(default_factory=dict)
    lists_properties: bool = False
    opens: bool = False
    closes: bool = False
    has_unevaluated: bool = False
    has_alternatives: bool = False
    families: set[str] = field(default_factory=set)
    types: frozenset[str] = TYPES

    @property
    def shared_names(self) -> frozenset[str]:
        """The properties that more than one schema describes."""
        if OTHERS_NAME in self.names and self.n_descriptions > 1:
            return frozenset(self.names)  # a pattern of one may describe each property of another
        return frozenset(name for name, count in self.names.items() if count > 1)

    @property
    def must_close(self) -> bool:
        """Whether the schemas list properties and say nothing of other ones."""
        return self.lists_properties and not (self.opens or self.closes or self.has_unevaluated)

    def property_names(self, with_required: bool = True) -> list[str]:
        """Return the properties that are described. `with_required`: also those that are only
        required.
        """
        return [
            name
            for name, count in self.names.items()
            if (count or with_required) and name not in (ITEMS_NAME, OTHERS_NAME)
        ]

    def add(self, other: "ValueFacts") -> None:
        """Add the facts of a schema that applies together with these."""
        self._merge(other, lambda first, second: first + second)
        self.types = intersect_types(self.types, other.types)

    def _merge(self, other: "ValueFacts", count: Callable[[int, int], int]) -> None:
        for name, number in other.names.items():
            self.names[name] = count(self.names.get(name, 0), number)
        self.n_descriptions = count(self.n_descriptions, other.n_descriptions)
        self.patterns |= other.patterns
        self.lists_properties |= other.lists_properties
        self.opens |= other.opens
        self.closes |= other.closes
        self.has_unevaluated |= other.has_unevaluated
        self.has_alternatives |= other.has_alternatives
        self.families |= other.families

    @staticmethod
    def of_alternatives(alternatives: Iterable["ValueFacts"]) -> "ValueFacts":
        """Return the facts of schemas of which one applies."""
        result, types = ValueFacts(), frozenset[str]()
        for facts in alternatives:
            result._merge(facts, max)
            types |= facts.types
        result.types = types
        return result


class FactCollector:
    """Collects the facts about the value at any location of a document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._facts: dict[Location, ValueFacts] = {}
        self._open: set[Location] = set()

    def __call__(self, location: Location) -> ValueFacts:
        """Return the facts about the value that the schema at `location` constrains."""
        if location in self._facts:
            return self._facts[location]
        if location in self._open:  # a reference that leads back to the same value
            return ValueFacts()
        if len(self._open) == MAX_LEVELS:
            return ValueFacts(opens=True, has_alternatives=True)  # nothing is certain
        self._open.add(location)
        facts = self._collect(self._document.value(location), location)
        self._open.discard(location)
        self._facts[location] = facts
        return facts

    def base(self, location: Location) -> ValueFacts:
        """Return the facts without the alternatives and conditions of the schema at `location`."""
        return self._collect(self._document.value(location), location, with_alternatives=False)

    def _collect(
        self, schema: Any, location: Location, with_alternatives: bool = True
    ) -> ValueFacts:
        facts = ValueFacts()
        if not isinstance(schema, dict):
            return facts
        self._add_own(facts, schema)
        if isinstance(reference := schema.get("$ref"), str):
            target = self._document.resolve(reference, location)
            if target is not None:
                facts.add(self(target))
        for branch in self._branches(schema, location, "allOf"):
            facts.add(branch)
        for key in ("anyOf", "oneOf") if with_alternatives else ():
            if branches := self._branches(schema, location, key):
                facts.has_alternatives = True
                facts.add(ValueFacts.of_alternatives(branches))
        if with_alternatives:
            self._add_conditions(facts, schema, location)
        if schema.get("nullable") is True:
            facts.types |= {"null"}
        return facts

    def _branches(self, schema: dict[str, Any], location: Location, key: str) -> list[ValueFacts]:
        """Return the facts of each schema in the list of a keyword."""
        branches = schema.get(key)
        count = len(branches) if isinstance(branches, list) else 0
        return [self((*location, key, str(number))) for number in range(count)]

    def _add_own(self, facts: ValueFacts, schema: dict[str, Any]) -> None:
        """Add what the schema itself says, without the schemas inside it."""
        for key in ("properties", "patternProperties"):
            if isinstance(table := schema.get(key), dict):
                facts.lists_properties |= key == "properties" or bool(table)
                if key == "properties":
                    facts.names |= dict.fromkeys(table, 1)
                else:
                    facts.patterns |= dict.fromkeys(table)
        if "additionalProperties" in schema:
            facts.closes = schema["additionalProperties"] is False
            facts.opens = not facts.closes
        facts.has_unevaluated = "unevaluatedProperties" in schema
        facts.n_descriptions = int(bool(facts.names or facts.patterns or facts.opens))
        if facts.patterns or isinstance(schema.get("additionalProperties"), dict):
            facts.names[OTHERS_NAME] = 1
        if ITEM_KEYS & schema.keys():
            facts.names[ITEMS_NAME] = 1
        for name in _required_names(schema):
            facts.names.setdefault(name, 0)
        facts.families |= {
            family for family, keys in FAMILIES.items() if not keys.isdisjoint(schema)
        }
        facts.types = own_types(schema)

    def _add_conditions(
        self, facts: ValueFacts, schema: dict[str, Any], location: Location
    ) -> None:
        """Add what the schemas of conditions say, which apply only to some values."""
        if not schema.keys().isdisjoint(("if", "not", "dependentSchemas", "dependencies")):
            facts.has_alternatives = True
        if "if" in schema:
            condition = [(*location, key) for key in ("if", "then") if key in schema]
            together = ValueFacts()
            for inner in condition:
                together.add(self(inner))
            otherwise = self((*location, "else")) if "else" in schema else ValueFacts()
            facts.add(ValueFacts.of_alternatives([together, otherwise]))
        for key in ("dependentSchemas", "dependencies"):
            table = schema.get(key)
            for name, inner in table.items() if isinstance(table, dict) else ():
                facts.names.setdefault(name, 0)
                if isinstance(inner, dict):
                    dependent = self((*location, key, name))
                    facts.add(ValueFacts.of_alternatives([dependent, ValueFacts()]))


def own_types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that the keywords type, const and enum of a schema allow."""
    types, named = TYPES, schema.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):
        types = frozenset(name for name in named if isinstance(name, str))
        if "number" in types:
            types |= {"integer"}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types = intersect_types(types, frozenset(map(value_type, values)))
    return types


def intersect_types(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """Return the types that both sets allow. Each integer is also a number."""
    both = first & second
    for one, other in ((first, second), (second, first)):
        if "integer" in one and "number" in other:
            both |= {"integer"}
    return both


def value_type(value: Any) -> str:
    """Return the JSON type of a value; "integer" for a number without a fraction."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def _required_names(schema: dict[str, Any]) -> list[str]:
    """Return the names that a schema requires, always or with another property."""
    required = schema.get("required")
    names = [*required] if isinstance(required, list) else []
    for key in ("dependentRequired", "dependencies"):
        table = schema.get(key)
        for name, others in table.items() if isinstance(table, dict) else ():
            names += [name, *(others if isinstance(others, list) else ())]
    return [name for name in names if isinstance(name, str)]
