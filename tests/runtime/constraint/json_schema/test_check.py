"""JSON schemas: which documents the grammar of a schema accepts, and which schemas are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import accepts
from tests.runtime.constraint.words import schema

ASSETS = Path(__file__).parents[4] / "shared" / "assets" / "json-schema"
MEETING = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 5},
        "day": {"enum": ["Mon", "Tue"]},
        "who": {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1, "maxItems": 2},
        "room": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 17}, {"type": "null"}]},
    },
    "required": ["title", "who"],
    "additionalProperties": False,
}
ANN = {"name": "Ann"}
MEETINGS: list[Any] = [
    {"title": "a", "who": [ANN]},
    {"title": "", "day": "Tue", "who": [ANN, ANN], "room": 17},
    {"title": "a", "who": [ANN], "room": None},
    {"title": "abcdef", "who": [ANN]},
    {"title": "a", "day": "Sun"},
    {"title": "a", "who": []},
    {"title": "a", "who": [ANN, ANN, ANN]},
    {"title": "a", "who": [{"name": ""}]},
    {"title": "a", "who": [ANN], "room": 2},
    {"title": "a", "who": [ANN], "room": 18},
    {"who": [ANN]},
    [],
    3,
    {"title": "a", "who": [ANN], "more": 1},
    {"title": "a", "who": [{**ANN, "age": 3}]},
    {"title": 3, "who": [ANN]},
]


def encode(value: Any) -> list[int]:
    """Return the tokens of a JSON document, which are its bytes."""
    return list(json.dumps(value, ensure_ascii=False).encode())


@pytest.mark.parametrize("value", MEETINGS, ids=json.dumps)
def test_grammar_accepts_the_documents_that_jsonschema_accepts(value: Any) -> None:
    valid = jsonschema.Draft202012Validator(MEETING).is_valid(value)
    assert accepts(schema(MEETING), encode(value)) == valid


def suite_groups() -> Iterator[dict[str, Any]]:
    """Yield the groups of the JSON Schema test suite: a schema and documents."""
    if not (ASSETS / "suite.jsonl").exists():
        pytest.skip("../shared/assets is not here")
    yield from map(json.loads, (ASSETS / "suite.jsonl").read_text().splitlines())


def test_invalid_documents_of_the_test_suite_are_not_accepted() -> None:
    refused, supersets, count = [], [], 0
    for group in suite_groups():
        try:
            grammar = schema(group["schema"], is_strict=True)
        except UserError as error:
            refused.append(str(error))
            continue
        for test in group["tests"]:
            count += 1
            if accepts(grammar, encode(test["data"])) and not test["valid"]:
                supersets.append((group["id"], test["data"]))
    assert supersets == []
    assert count > 100
    assert len(refused) <= 3
    assert all(" at #" in reason for reason in refused)


REMOTE = "https://example.org/schema"
NOT_ENFORCED = [
    (
        {"properties": {"a/b": {"not": {"type": "integer"}}}},
        "not at #/properties/a~1b",
    ),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "uniqueItems at #/items"),
    ({"if": {"multipleOf": 3}, "then": {"minimum": 9}}, "if at # (its opposite"),
    ({"allOf": [{}, {"propertyNames": {"format": "email"}}]}, "propertyNames at #/allOf/1"),
    (
        {"additionalProperties": {"anyOf": [{}], "unevaluatedItems": False}},
        "unevaluatedItems at #/additionalProperties",
    ),
    ({"items": {"contains": {"type": "integer"}}}, "contains at #/items"),
    ({"items": {"format": "phone"}}, 'format "phone" at #/items'),
    ({"properties": {"a": {"pattern": "a(?=b)"}}}, "pattern at #/properties/a (a lookahead"),
    ({"items": {"pattern": r"^(a|b)\1$"}}, r"pattern at #/items (\1)"),
    (
        {"properties": {"a": {"enum": [1, [1e30]]}}},
        "enum at #/properties/a (a number beyond 2^53)",
    ),
    ({"$ref": REMOTE}, "nothing is fetched"),
    ({"$ref": "#/$defs/none"}, "there is no such schema"),
    ({"additionalProperties": {}, "minProperties": 3}, "minProperties 3 at #"),
    (
        {"properties": {"a": {"items": {"oneOf": [{"minimum": 2}, {"type": "integer"}]}}}},
        "oneOf at #/properties/a/items (more than one alternative may hold)",
    ),
    ({"properties": {"a": {"type": "STRING"}}}, 'type "STRING" at #/properties/a'),
    ({"properties": {"a": {"required": True}}}, "required at #/properties/a"),
    ({"properties": {"a": {"maxLenght": 3}}}, "maxLenght at #/properties/a (no keyword; maxLength"),
    ({"items": {"additionalproperties": False}}, "additionalproperties at #/items (no keyword"),
]


@pytest.mark.parametrize(("value", "message"), NOT_ENFORCED)
def test_what_cannot_be_enforced_is_named_or_refused_if_strict(value: Any, message: str) -> None:
    grammar = schema(value)
    assert any(note.startswith(message) or message in note for note in grammar.not_enforced)
    with pytest.raises(UserError) as refused:
        schema(value, is_strict=True)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert refused.value.hint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"properties": {"a": 5}}, "a number instead of a schema at #/properties/a"),
        ({"properties": []}, "an array at #/properties"),
        ({"items": {"maximum": True}}, "a boolean at #/items/maximum"),
        ({"minLength": "3"}, "a string at #/minLength"),
        ({"required": "a"}, "a string at #/required"),
        ({"$ref": "#"}, "refers back to itself"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
            },
            "refers back to itself",
        ),
        ({"properties": {"a": {"type": "text"}}}, 'type "text" at #/properties/a'),
        (
            {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}]},
            "no document satisfies the schema: it excludes every value at #/anyOf/0",
        ),
        (False, "no document is valid"),
        ("[]", "the schema is an array"),
        ("{", "is not JSON"),
        ('{"const": NaN}', "NaN is no number of JSON"),
        ('{"const": 1e999}', "1e999 is too large"),
        ('{"const": "\\ud800"}', "half a character"),
        ("[" * 100_000, "more than 64 levels"),
        ('{"a":' * 100 + "1" + "}" * 100, "more than 64 levels"),
        ('{"description": "' + "x" * 300_000 + '"}', "characters"),
    ],
)
def test_invalid_schema_is_refused_with_keyword_and_path(value: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        schema(value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert refused.value.hint


def test_annotations_are_no_constraints() -> None:
    annotations = {
        "title": "T",
        "description": "D",
        "default": 3,
        "examples": [1],
        "deprecated": True,
        "x-order": 1,
        "x-guidance": {"lenient": True},
        "uniqueItems": False,
        "id": "b",
        "strict": True,
        "enumNames": ["yes", "no"],
        "xml": {"name": "b"},
        "markdownDescription": "**b**",
        "colour": "red",
        "format": "int32",
    }
    grammar = schema({**annotations, "type": "boolean"}, is_strict=True)
    assert [accepts(grammar, encode(value)) for value in (True, False, None, 1, "true")] == [
        True,
        True,
    ] + [False] * 3


def test_counts_may_be_floats_with_integer_values() -> None:
    assert accepts(schema({"type": "string", "maxLength": 2.0}), encode("ab"))
    assert not accepts(schema({"type": "string", "maxLength": 2.0}), encode("abc"))


def test_schema_may_refer_to_itself_for_an_inner_value() -> None:
    tree = {"type": "object", "properties": {"in": {"$ref": "#"}}, "additionalProperties": False}
    assert accepts(schema(tree), encode({"in": {"in": {}}}))
    assert not accepts(schema(tree), encode({"in": {"in": 3}}))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"b":[1,2]}',
        '{ "a" : 1 }',
        '{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}',
        '{\n\t"a":\n\n\t\t1\n}',
        "{\n" + " " * 20 + '"a": 1}',
    ],
)
def test_documents_are_laid_out_as_models_write_them(text: str) -> None:
    assert accepts(schema({"type": "object"}), list(text.encode()))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":  1}',
        '{\n\n\n"a": 1}',
        "{\n" + " " * 21 + '"a": 1}',
        '{\t"a": 1}',
        '{"a": 1}\n',
        " {}",
        '{\n \n"a": 1}',
    ],
)
def test_white_space_is_bounded(text: str) -> None:
    assert not accepts(schema({"type": "object"}), list(text.encode()))


def test_rigid_grammar_allows_one_layout() -> None:
    grammar = schema({"type": "object"})

    def is_accepted(text: str) -> bool:
        matcher = grammar.start(is_rigid=True)
        for token in text.encode():
            if not matcher.allows(token):
                return False
            matcher.accept(token)
        return matcher.is_accepting

    assert is_accepted('{"a": 1, "b": [1, 2]}')
    assert not is_accepted('{"a":1}')
    assert not is_accepted('{\n"a": 1}')
