"""Random schemas are refused, or all output of a random model is valid by jsonschema."""

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
from tests.runtime.constraint.test_schema_check import MEETING
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
]


CLOSING = set(b'"}]')


def tables(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from tables(inner)


def written(grammar: Grammar, dice: random.Random) -> bytes | None:
    """What a model writes that cares for nothing but to end soon; None where it does not end."""
    matcher, said = grammar.start(), bytearray()
    for _ in range(150):
        legal = np.flatnonzero(
            np.unpackbits(matcher.mask(), count=N_VOCAB, bitorder="little")
        ).tolist()
        if not legal:  # two bounds that exclude each other
            return None
        if EOS in legal and (legal == [EOS] or dice.random() < 0.5):
            return bytes(said)
        closing = [token for token in legal if token in CLOSING]
        token = dice.choice(
            closing if closing and dice.random() < 0.4 else [one for one in legal if one != EOS]
        )
        matcher.accept(token)
        said.append(token)
    return None


def test_what_is_not_refused_is_kept() -> None:
    dice = random.Random(7)
    refused: list[str] = []
    judged = 0
    for _ in range(2500):
        given = copy.deepcopy(dice.choice(BASES))
        for _ in range(dice.randint(1, 2)):
            dice.choice(list(tables(given)))[dice.choice(KEYS)] = copy.deepcopy(dice.choice(VALUES))
        try:
            said = written(schema(given), dice)
        except UserError as error:
            refused.append(str(error))
            continue
        try:
            jsonschema.Draft202012Validator.check_schema(given)
        except (
            jsonschema.SchemaError
        ):  # nobody knows what is valid by it: it is enough that nothing broke
            continue
        if said is not None:
            judged += 1
            assert jsonschema.Draft202012Validator(given).is_valid(json.loads(said)), (given, said)
    assert judged > 100
    assert len(refused) > 500
    assert not any("\n" in reason for reason in refused)
