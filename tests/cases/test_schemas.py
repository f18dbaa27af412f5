"""JSON schemas that strangers use: which documents they accept, and what is not enforced of them.

A line of strangers.jsonl is a schema with documents that its grammar accepts, documents that it
does not accept, and what it does not enforce. pydantic.jsonl and zod.jsonl are the schemas of
everyday types, which scripts/reference/everyday_types.py and .mjs write.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import accepts
from scripts.reference.schema_documents import compile_schema, encode, make_judge, write_randomly

FOLDER = Path(__file__).parent / "schemas"


def read_cases(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of cases."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


STRANGERS = read_cases("strangers")
EVERYDAY = {
    f"{maker} {case['name']}": case["schema"]
    for maker in ("pydantic", "zod")
    for case in read_cases(maker)
}
# What cannot be enforced of the everyday types: sets, texts that are patterns, one lookahead.
NOT_ENFORCED = {
    "pydantic set of int": ("uniqueItems at #",),
    "pydantic Pattern": ('format "regex" at #',),
    "zod iso.duration": ("pattern at # (a lookahead or lookbehind)",),
}


@pytest.mark.parametrize("case", STRANGERS, ids=lambda case: case["name"])
def test_stranger_is_followed_as_its_author_means_it(case: dict[str, Any]) -> None:
    grammar = compile_schema(case["schema"], is_strict=False)
    assert list(grammar.not_enforced) == case["not_enforced"]
    rejected = [document for document in case["accepts"] if not accepts(grammar, encode(document))]
    accepted = [document for document in case["rejects"] if accepts(grammar, encode(document))]
    assert (rejected, accepted) == ([], [])


@pytest.mark.parametrize("case", STRANGERS, ids=lambda case: case["name"])
def test_stranger_is_refused_strictly_if_it_is_not_enforced(case: dict[str, Any]) -> None:
    if not case["not_enforced"]:
        compile_schema(case["schema"], is_strict=True)
        return
    with pytest.raises(UserError) as refused:
        compile_schema(case["schema"], is_strict=True)
    assert all(note in str(refused.value) for note in case["not_enforced"])


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_type_is_taken_and_its_documents_are_valid(name: str) -> None:
    schema = EVERYDAY[name]
    grammar = compile_schema(schema, is_strict=False)
    assert grammar.not_enforced == NOT_ENFORCED.get(name, ())
    if grammar.not_enforced:
        return
    judge, numbers = make_judge(schema), random.Random(7)
    documents = [write_randomly(grammar, numbers) for _ in range(4)]
    for document in documents:
        if document is not None:
            judge.validate(json.loads(document))


def test_there_are_sixty_types_of_each_maker() -> None:
    assert len(EVERYDAY) == 120


def test_large_enum_is_followed() -> None:
    grammar = compile_schema({"enum": [f"value-{number:05}" for number in range(2000)]}, True)
    assert accepts(grammar, encode("value-01999"))
    assert not accepts(grammar, encode("value-02000"))
