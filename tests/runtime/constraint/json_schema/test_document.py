"""What references in a schema mean."""

from typing import Any

import pytest

from llmcli.runtime.constraint.json_schema.document import SchemaDocument, format_location

ROOT: dict[str, Any] = {
    "$id": "https://example.invalid/root.json",
    "$defs": {
        "a/b": {"type": "integer"},
        "c%20d": {"type": "string"},
        "e f": {"type": "null"},
        "inner": {
            "$id": "folder/inner.json",
            "$anchor": "spot",
            "$defs": {"x": {"$dynamicAnchor": "node"}},
            "properties": {"id": {"type": "integer"}},
        },
        "urn": {"$id": "urn:example:u", "$defs": {"y": {}}},
        "one": {"allOf": [{"$anchor": "deep"}]},
    },
    "enum": [{"$id": "data.json"}],
    "x-other": {"$id": "unknown.json", "part": {}},
}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("#", "#"),
        ("#/$defs/a~1b", "#/$defs/a~1b"),
        ("#/$defs/a/b", "#/$defs/a~1b"),
        ("#/$defs/c%2520d", "#/$defs/c%20d"),
        ("#/$defs/c%20d", "#/$defs/c%20d"),
        ("#/$defs/e%20f", "#/$defs/e f"),
        ("root.json", "#"),
        ("https://example.invalid/root.json#/$defs/one", "#/$defs/one"),
        ("folder/inner.json", "#/$defs/inner"),
        ("/folder/inner.json#/$defs/x", "#/$defs/inner/$defs/x"),
        ("folder/inner.json#spot", "#/$defs/inner"),
        ("urn:example:u#/$defs/y", "#/$defs/urn/$defs/y"),
        ("#deep", "#/$defs/one/allOf/0"),
        ("#/x-other/part", "#/x-other/part"),
        ("#/$defs/one/allOf/0", "#/$defs/one/allOf/0"),
        ("inner", "#/$defs/inner"),
        ("#spot", None),
        ("#/$defs/none", None),
        ("#/$defs/one/allOf/1", None),
        ("#/$defs/one/allOf/x", None),
        ("#/$id/x", None),
        ("data.json", None),
        ("unknown.json", None),
        ("https://example.invalid/other.json", None),
        ("http://[", None),
    ],
)
def test_reference_from_the_root(reference: str, expected: str | None) -> None:
    location = SchemaDocument(ROOT).resolve(reference, ())
    assert (None if location is None else format_location(location)) == expected


def test_reference_inside_an_identified_schema_is_relative_to_it() -> None:
    document = SchemaDocument(ROOT)
    inside = ("$defs", "inner", "properties", "id")
    assert document.resolve("#spot", inside) == ("$defs", "inner")
    assert document.resolve("#/$defs/x", inside) == ("$defs", "inner", "$defs", "x")
    assert document.resolve("../root.json", inside) == ()
    assert document.value(("$defs", "inner", "properties", "id")) == {"type": "integer"}


def test_dynamic_reference_is_followed_if_there_is_one_target() -> None:
    document = SchemaDocument(ROOT)
    assert document.resolve_dynamic("#node", ()) == ("$defs", "inner", "$defs", "x")
    twice = {"$defs": {name: {"$dynamicAnchor": "n"} for name in "ab"}}
    assert SchemaDocument(twice).resolve_dynamic("#n", ()) is None


def test_until_draft_7_an_identifier_beside_a_reference_does_not_count() -> None:
    definitions = {
        "a": {"$id": "a.json"},
        "other": {"$id": "/x/a.json"},
        "b": {"$id": "/x/", "$ref": "a.json"},
    }
    for draft, expected in (("draft-07", "a"), ("draft/2020-12", "other")):
        schema = f"http://json-schema.org/{draft}/schema#"
        document = SchemaDocument({"$schema": schema, "definitions": definitions})
        assert document.resolve("a.json", ("definitions", "b")) == ("definitions", expected)
