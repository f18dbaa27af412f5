"""Random JSON schemas are refused, or everything that a random model writes inside their grammar is
valid.
"""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Grammar
from tests.fixtures.fakes import EOS, N_VOCAB
from tests.runtime.constraint.json_schema.test_check import MEETING
from tests.runtime.constraint.words import schema

BASES: list[Any] = [
    MEETING,
    {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"enum": ["a", None, 1.5]}],
        "items": {"type": "boolean"},
    },
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    },
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {"type": "number", "minimum": -3, "exclusiveMaximum": 12},
    {"oneOf": [{"type": "null"}, {"type": "string", "pattern": "^[ab]{2,3}$"}]},
    {"type": "string", "format": "date"},
    {
        "type": "object",
        "properties": {"a": {"enum": ["b", "c"]}, "b": {"type": "string"}},
        "required": ["a"],
        "oneOf": [{"required": ["b"]}, {"properties": {"b": False}}],
    },
    {
        "allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["b"]}],
        "unevaluatedProperties": False,
        "properties": {"b": {}},
    },
]
KEYS = [
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "not",
    "uniqueItems",
    "$defs",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "propertyNames",
    "contains",
    "unevaluatedProperties",
    "unevaluatedItems",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2.0,
    2.5,
    1e30,
    10**30,
    "",
    "a",
    "\0",
    "é",
    "(",
    "^a*$",
    "#",
    "#/$defs/a",
    "date",
    [],
    [None],
    ["a", "b"],
    ["a", "a"],
    {},
    {"type": "string"},
    {"a": {}},
    ["string", "null"],
    "object",
    "integer",
    [{"$ref": "#"}],
    [True],
    [False],
    {"anyOf": []},
    [{"type": "integer"}, {"type": "number"}],
    {"a": {"const": 2}},
    {"required": ["a"]},
    {"properties": {"a": {"const": "b"}}, "required": ["a"]},
    {"type": ["string", "object"]},
    [{"required": ["a"]}, {"properties": {"b": {}}}],
    {"a": ["b"]},
    {"a": {"properties": {"b": {"type": "string"}}}},
    {"minLength": 2},
]


CLOSING = set(b'"}]')


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all JSON objects in a value, also nested ones."""
    if isinstance(value, dict):
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from objects(inner)


def write_randomly(grammar: Grammar, random_numbers: random.Random) -> bytes | None:
    """Return a random text that the grammar accepts, written by choosing allowed tokens at random
    and closing brackets early. Return None if the text does not end.
    """
    matcher, document = grammar.start(), bytearray()
    for _ in range(150):
        allowed = np.flatnonzero(
            np.unpackbits(matcher.mask(), count=N_VOCAB, bitorder="little")
        ).tolist()
        if not allowed:  # two bounds that exclude each other
            return None
        if EOS in allowed and (allowed == [EOS] or random_numbers.random() < 0.5):
            return bytes(document)
        closing = [token for token in allowed if token in CLOSING]
        token = random_numbers.choice(
            closing
            if closing and random_numbers.random() < 0.4
            else [token for token in allowed if token != EOS]
        )
        matcher.accept(token)
        document.append(token)
    return None


def test_schemas_that_are_not_refused_are_enforced() -> None:
    random_numbers = random.Random(7)
    refused: list[str] = []
    n_validated = 0
    for _ in range(2500):
        value = copy.deepcopy(random_numbers.choice(BASES))
        for _ in range(random_numbers.randint(1, 2)):
            random_numbers.choice(list(objects(value)))[random_numbers.choice(KEYS)] = (
                copy.deepcopy(random_numbers.choice(VALUES))
            )
        try:
            document = write_randomly(schema(value, is_strict=True), random_numbers)
        except UserError as error:
            refused.append(str(error))
            continue
        try:
            jsonschema.Draft202012Validator.check_schema(value)
        except jsonschema.SchemaError:  # there is no reference for invalid schemas
            continue
        if document is not None:
            n_validated += 1
            assert jsonschema.Draft202012Validator(value).is_valid(json.loads(document)), (
                value,
                document,
            )
    assert n_validated > 100
    assert len(refused) > 500
    assert not any("\n" in reason for reason in refused)
