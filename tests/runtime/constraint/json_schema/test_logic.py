"""Proofs that two schemas do not overlap, and negated schemas. jsonschema is the oracle, over random
schemas and values.
"""

import random
from typing import Any

import jsonschema
import pytest

from llmcli.runtime.constraint.json_schema.document import SchemaDocument
from llmcli.runtime.constraint.json_schema.negation import Negator, NoNegation
from llmcli.runtime.constraint.json_schema.overlap import OverlapProver
from llmcli.runtime.constraint.json_schema.rewriting import SchemaRewriter
from llmcli.runtime.constraint.json_schema.writer import EXACT

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 1.5, -1, "", "a", "b", "ab", "abc"),
    *([], [1], ["a"], [1, "a"], [[]]),
    *({}, {"k": "a"}, {"k": "b"}, {"k": 1}, {"l": 2}, {"k": "a", "l": 2}, {"k": "b", "l": "x"}),
]
SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "number"},
    {"type": ["null", "boolean"]},
    {"const": "a"},
    {"const": 1},
    {"enum": ["a", "b", 1, None]},
    {"enum": [True, 2, "ab"]},
    {"minimum": 2},
    {"maximum": 1},
    {"type": "number", "exclusiveMinimum": 1},
    {"type": "number", "exclusiveMaximum": 1},
    {"type": "string", "minLength": 2},
    {"maxLength": 1},
]


def random_schema(numbers: random.Random, levels: int = 3) -> Any:
    """Return a random schema in the normal form, without references."""
    kind = numbers.randrange(8 if levels else 2)
    if kind < 3:
        return numbers.choice(SCALARS)
    if kind == 3:
        names = [name for name in ("k", "l") if numbers.random() < 0.7]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: random_schema(numbers, levels - 1) for name in names},
            "required": [name for name in ("k", "l") if numbers.random() < 0.4],
        }
        return schema | ({"additionalProperties": False} if numbers.random() < 0.3 else {})
    if kind == 4:
        return {"type": "array", "minItems": 1, "items": random_schema(numbers, levels - 1)}
    if kind == 5:
        return {"type": "array", "maxItems": numbers.randrange(2)}
    key = "anyOf" if kind == 6 else "allOf"
    return {key: [random_schema(numbers, levels - 1) for _ in range(2)]}


def is_valid(schema: Any, value: Any) -> bool:
    """Return whether jsonschema accepts a value."""
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_proof_that_two_schemas_have_no_value_in_common_is_right() -> None:
    numbers, n_proved = random.Random(3), 0
    prover = OverlapProver(lambda reference: None)
    for _ in range(3000):
        first, second = random_schema(numbers), random_schema(numbers)
        if prover.are_disjoint(first, second):
            n_proved += 1
            common = [v for v in VALUES if is_valid(first, v) and is_valid(second, v)]
            assert common == [], (first, second)
    assert n_proved > 300


def test_negated_schema_accepts_exactly_the_other_values() -> None:
    numbers, n_negated = random.Random(4), 0
    negator = Negator(lambda reference: None)
    for _ in range(1500):
        schema = random_schema(numbers)
        try:
            negated = negator.negate(schema)
        except NoNegation:
            continue
        n_negated += 1
        for value in VALUES:
            assert is_valid(negated, value) != is_valid(schema, value), (schema, negated, value)
    assert n_negated > 500


@pytest.mark.parametrize(
    ("schemas", "expected"),
    [
        ([{"const": value} for value in "ab"], False),
        (
            [
                {"required": ["k"], "properties": {"k": {"enum": [value, value * 2]}}}
                for value in "abc"
            ],
            True,
        ),
        ([{"required": ["k"], "properties": {"k": {"const": "a"}}}] * 2, False),
        ([{"properties": {"k": {"const": value}}} for value in "ab"], False),
        ([{"required": ["k"], "properties": {"k": {"const": value}}} for value in (1, 2)], False),
    ],
)
def test_unions_with_a_discriminator_are_found_at_a_glance(
    schemas: list[Any], expected: bool
) -> None:
    assert OverlapProver(lambda reference: None).are_distinct(schemas) == expected


def test_exact_form_accepts_the_documents_of_the_schema() -> None:
    numbers = random.Random(5)
    for _ in range(800):
        schema = {"oneOf": [random_schema(numbers), random_schema(numbers)]}
        rewriter = SchemaRewriter(SchemaDocument(schema))
        draft = rewriter.write_exactly(schema, ())
        is_exact = rewriter.finish_exactly(draft)
        for value in VALUES:
            rewritten = is_valid(draft.schema, value)
            assert rewritten or not is_valid(schema, value), (schema, draft.schema, value)
            if is_exact:
                assert rewritten == is_valid(schema, value), (schema, draft.schema, value)


def test_scopes_are_not_mixed() -> None:
    closed = {"type": "object", "properties": {"k": {}}}
    schema = {"$defs": {"a": closed}, "allOf": [{"$ref": "#/$defs/a"}, {"required": ["l"]}]}
    rewriter = SchemaRewriter(SchemaDocument(schema))
    rewritten = rewriter.rewrite_root()
    for document in ({}, {"k": 1}, {"l": 1}, {"k": 1, "l": 1}):
        assert is_valid(rewritten, document) == ("l" in document)
    assert is_valid(rewriter.rewrite(closed, ("$defs", "a"), EXACT), {"m": 1})
