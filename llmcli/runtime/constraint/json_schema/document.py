"""A JSON schema as a document: the location of each schema in it, and what its references mean."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# The way from the root of a document to a value in it: names of properties, and list indices.
Location = tuple[str, ...]

# Keywords whose value is a schema, an object of schemas, or no schema although it may look like one.
# A list of schemas may stand under any other keyword.
SCHEMA_KEYS = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
TABLE_KEYS = frozenset(
    {
        "$defs",
        "definitions",
        "dependencies",
        "dependentSchemas",
        "patternProperties",
        "properties",
    }
)
DATA_KEYS = ("const", "enum", "default", "examples", "example")
# Where OpenAPI, Swagger and JSON Schema keep schemas with names.
NAMED_SCHEMA_LOCATIONS: tuple[Location, ...] = (
    ("$defs",),
    ("definitions",),
    ("components", "schemas"),
)
OLD_DRAFT = re.compile("json-schema.org/draft-0[3-7]/")
NO_BASE = ""  # the base address of a schema without $id


class SchemaDocument:
    """A parsed JSON schema. It finds the schema that a reference means."""

    def __init__(self, root: Any) -> None:
        self.root = root
        # until draft 7, nothing beside a $ref counts
        self._ignores_siblings = isinstance(root, dict) and OLD_DRAFT.search(
            str(root.get("$schema"))
        )
        self._resources: dict[str, Location] = {}  # by address, without the fragment
        self._bases: dict[Location, str] = {}  # the addresses by location
        self._anchors: dict[tuple[str, str], Location] = {}  # by address and name
        self._dynamic_anchors: dict[str, list[Location]] = {}  # by name
        self._index(root, (), NO_BASE)
        self._resources.setdefault(NO_BASE, ())

    def value(self, location: Location) -> Any:
        """Return the value at a location."""
        value = self.root
        for key in location:
            value = value[int(key)] if isinstance(value, list) else value[key]
        return value

    def resolve(self, reference: str, location: Location) -> Location | None:
        """Return the location that a $ref means, or None if it is not in this document.

        `location`: where the reference stands, because it may be relative to an $id around it.
        Percent-encoded and plain spellings of a name are understood.
        """
        address, _, fragment = reference.partition("#")
        base = self._base(location)
        resource = self._resources.get(_join(base, address) if address else base)
        if resource is None and address:
            resource = self._resources.get(address)
        if resource is None:
            return self._named_schema(reference) if "#" not in reference else None
        if not fragment:
            return resource
        for spelling in dict.fromkeys((unquote(fragment), fragment)):
            if spelling.startswith("/"):
                target = self._follow_pointer(resource, spelling[1:])
            else:
                target = self._anchors.get((self._base(resource), spelling))
            if target is not None:
                return target
        return None

    def resolve_dynamic(self, reference: str, location: Location) -> Location | None:
        """Return the location that a $dynamicRef means, or None if that depends on the way to it."""
        locations = self._dynamic_anchors.get(reference.partition("#")[2], [])
        if len(locations) > 1 or (locations and not reference.startswith("#")):
            return None
        return locations[0] if locations else self.resolve(reference, location)

    @property
    def has_recursive_anchor(self) -> bool:
        """Whether a schema has $recursiveAnchor, which changes what $recursiveRef means."""
        return any(value.get("$recursiveAnchor") is True for _, value in _objects(self.root, ()))

    def _index(self, schema: Any, location: Location, base: str) -> None:
        """Record the identifiers of a schema and of the schemas inside it. `base`: the address that
        identifiers are relative to.
        """
        if not isinstance(schema, dict):
            return
        for identifier in self._identifiers(schema):
            address, fragment = urldefrag(identifier)
            if address:
                base = _join(base, address)
                self._bases[location] = base
                self._resources.setdefault(base, location)
            if fragment:
                self._anchors.setdefault((base, fragment), location)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(key), str):
                self._anchors.setdefault((base, name), location)
                if key == "$dynamicAnchor":
                    self._dynamic_anchors.setdefault(name, []).append(location)
        for key, inner in schema.items():
            if key in TABLE_KEYS and isinstance(inner, dict):
                for name, schema_of_name in inner.items():
                    self._index(schema_of_name, (*location, key, name), base)
            elif key == "components" and isinstance(inner, dict):
                self._index({"$defs": inner.get("schemas")}, (*location, key), base)
            elif key not in DATA_KEYS:
                for number, entry in enumerate(inner if isinstance(inner, list) else ()):
                    self._index(entry, (*location, key, str(number)), base)
                if key in SCHEMA_KEYS:
                    self._index(inner, (*location, key), base)

    def _identifiers(self, schema: dict[str, Any]) -> Iterator[str]:
        """Yield the $id of a schema, and the `id` of draft 4."""
        if self._ignores_siblings and "$ref" in schema:
            return
        for key in ("$id", "id"):
            if isinstance(value := schema.get(key), str):
                yield value

    def _base(self, location: Location) -> str:
        """Return the address that references at a location are relative to."""
        ends = range(len(location), -1, -1)
        bases = (self._bases[location[:end]] for end in ends if location[:end] in self._bases)
        return next(bases, NO_BASE)

    def _follow_pointer(self, start: Location, pointer: str) -> Location | None:
        """Return the location that a JSON pointer without its first slash means, or None. A name that
        contains a slash may be written without ~1.
        """
        if not pointer and not isinstance(self.value(start), dict):
            return None
        value, steps = self.value(start), pointer.split("/")
        location, index = start, 0
        while index < len(steps):
            if isinstance(value, list):
                step = steps[index]
                if not step.isdecimal() or int(step) >= len(value):
                    return None
                value, location, index = value[int(step)], (*location, step), index + 1
                continue
            if not isinstance(value, dict):
                return None
            names = (
                (spelling, end)
                for end in range(index + 1, len(steps) + 1)
                for text in ["/".join(steps[index:end])]
                for spelling in (text.replace("~1", "/").replace("~0", "~"), text)
            )
            name, end = next(((name, end) for name, end in names if name in value), (None, 0))
            if name is None:
                return None
            value, location, index = value[name], (*location, name), end
        return location

    def _named_schema(self, name: str) -> Location | None:
        """Return the location of the schema with a bare name, as Swagger 1.2 refers to it."""
        for folder in NAMED_SCHEMA_LOCATIONS:
            try:
                schemas = self.value(folder)
            except (KeyError, TypeError, ValueError, IndexError):
                continue
            if isinstance(schemas, dict) and name in schemas:
                return (*folder, name)
        return None


def format_location(location: Location) -> str:
    """Return a location as a JSON pointer such as #/items."""
    return "/".join(["#", *(key.replace("~", "~0").replace("/", "~1") for key in location)])


def _join(base: str, address: str) -> str:
    """Return an address that is relative to `base`."""
    try:
        return urljoin(base, address) if ":" not in address.split("/")[0] else address
    except ValueError:  # of a wrong IPv6 address
        return address


def _objects(value: Any, location: Location) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield all objects in a value, with their locations."""
    if isinstance(value, dict):
        yield location, value
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from _objects(inner, (*location, str(key)))
