"""The cost of compiling JSON schemas: schemas that would take too long are refused, large cheap
ones are compiled.
"""

import json
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.runtime.constraint import llguidance, tool_calls
from llmcli.runtime.constraint.base import accepts
from llmcli.runtime.constraint.json_schema import check as schema_check
from llmcli.runtime.constraint.json_schema.negation import Negator
from llmcli.runtime.constraint.json_schema.overlap import MAX_TOTAL, OverlapProver
from llmcli.runtime.constraint.json_schema.rewriting import SchemaRewriter
from llmcli.runtime.constraint.tool_calls import AnswerSchema
from tests.runtime.constraint import words

STRING = {"type": "string"}


def properties(count: int, first: int = 0) -> dict[str, Any]:
    return {f"p{number}": STRING for number in range(first, first + count)}


def references(count: int, wrap: Any) -> dict[str, Any]:
    """Return a schema with `count` definitions, each of which refers to the previous one. `wrap`
    puts the reference into a schema.
    """
    parts = {"d0": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    parts |= {f"d{one}": wrap({"$ref": f"#/$defs/d{one - 1}"}) for one in range(1, count)}
    return {"$defs": parts, "$ref": f"#/$defs/d{count - 1}"}


def nested(inner: Any, levels: int = 8) -> Any:
    """Return a schema of nested arrays around `inner`."""
    for _ in range(levels):
        inner = {"items": inner}
    return inner


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"properties": properties(3000)}, "3,000 properties in a row that may be left out"),
        (
            {"allOf": [{"properties": properties(900, first)} for first in (0, 900, 1800)]},
            "properties in a row",
        ),
        (
            {"prefixItems": [{"properties": {key: {} for key in map(str, range(50))}}] * 130},
            "6,500 properties",
        ),
        (
            {"type": "object", "required": [f"{number:x}" for number in range(20_000)]},
            "20,000 required names",
        ),
        (
            {"patternProperties": {f"^k{number}_[a-z]+$": STRING for number in range(101)}},
            "101 patternProperties",
        ),
        (
            {"prefixItems": [{"type": "integer", "multipleOf": 9973} for _ in range(11)]},
            "109,692 distinct steps",
        ),
        (
            {"anyOf": [{"type": "integer", "multipleOf": number} for number in (211, 223)]},
            "47,484 distinct steps",
        ),
        (
            {"anyOf": [{"type": "string", "pattern": f"^a{number}"} for number in range(1001)]},
            "1,001 patterns",
        ),
        (
            references(500, lambda one: {"allOf": [one, {"type": "object"}]}),
            "500 references merged",
        ),
        ({"const": "x" * 100_000}, "100,000 characters in one const"),
    ],
)
def test_schema_that_would_take_too_long_is_refused_with_the_count(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        schema_check.check_schema(json.dumps(given))
    assert caught.value.hint


def test_costs_of_all_functions_are_added() -> None:
    tools = [
        AnswerSchema({"type": "object", "properties": properties(300)}, True, f"tool{number}")
        for number in range(30)
    ]
    with pytest.raises(UserError, match="function tool20: the schema has 6,300 properties"):
        tool_calls.tool_call_constraint(tools, ())
    assert tool_calls.tool_call_constraint(tools[:10], ())
    lenient = [replace(tool, is_strict=False) for tool in tools]
    calls = tool_calls.read_tool_calls(tool_calls.tool_call_constraint(lenient, ()).text)
    assert [note.split(":")[0] for note in calls.not_enforced] == [
        f"function tool{number}" for number in range(20, 30)
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
        {"type": "string", "minLength": 10**9},
        {"enum": [f"value {number}" for number in range(5000)]},
        {"type": "number", "multipleOf": 0.01},
        {"type": "string", "pattern": "^((a{0,50}){0,50}){0,50}$"},
        {"type": "string", "pattern": "^(a|aa)+(.*)*b$"},
        {
            "anyOf": [
                {"type": "object", "properties": {"k": {"const": number}}} for number in range(1000)
            ]
        },
    ],
)
def test_schema_that_only_looks_large_is_compiled(given: Any) -> None:
    assert words.schema(given).start().mask().any()


def test_schema_with_many_properties_is_enforced() -> None:
    grammar = words.schema(
        {"type": "object", "properties": properties(1000), "additionalProperties": False}
    )
    assert accepts(grammar, list(b'{"p3": "a", "p999": ""}'))
    assert not accepts(grammar, list(b'{"p3": "a", "p2": ""}'))
    assert not accepts(grammar, list(b'{"p1000": ""}'))


@pytest.mark.parametrize(
    "wrap",
    [
        nested,
        lambda one: {"type": "array", "items": nested(one, 40)},
        lambda one: {"properties": {"a": {"properties": {"b": one}}}},
    ],
)
def test_deep_references_are_refused_without_a_crash(wrap: Any) -> None:
    try:
        words.schema(references(300, wrap))
    except UserError as error:  # from a limit of llguidance
        message = str(error)
    else:
        message = "too large"
    assert "too large" in message


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: {"anyOf": [one, one]},
        lambda one: {"oneOf": [one, {"type": "null"}]},
        lambda one: {"oneOf": [one, one, one]},
        lambda one: {"not": {"anyOf": [one, {"type": "null"}]}},
        lambda one: {"if": one, "then": one, "else": one},
    ],
)
def test_checking_a_schema_is_bounded(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[str]()
    for kind, name in (
        (OverlapProver, "_compare"),
        (Negator, "negate"),
        (SchemaRewriter, "_references"),
        (SchemaRewriter, "rewrite"),
    ):
        original = getattr(kind, name)

        def count(*given: Any, original: Any = original, name: str = name) -> Any:
            counts[name] += 1
            return original(*given)

        monkeypatch.setattr(kind, name, count)
    with suppress(UserError):  # it may have too many references
        schema_check.check_schema(json.dumps(references(300, wrap)))
    assert counts["_compare"] <= MAX_TOTAL + 10_000
    assert counts["negate"] < 20_000
    assert counts["_references"] < 20_000
    assert counts["rewrite"] < 5_000


def test_search_for_the_refused_inner_schema_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    compiler: Any = llguidance.LLGuidanceCompiler
    build_matcher = compiler._build_matcher
    monkeypatch.setattr(
        compiler,
        "_build_matcher",
        lambda self, text: lengths.append(len(text)) or build_matcher(self, text),
    )
    parts = {
        f"p{number}": {"enum": [f"{number} {other}" for other in range(30)]} for number in range(60)
    }
    bad = {"properties": {"z": {"pattern": "^c$"}}}
    with pytest.raises(UserError, match="cannot be followed"):
        words.schema(
            {
                "type": "object",
                "properties": {**parts, "z": {"pattern": "^(?:a|b)$", "type": "string"}},
                "required": ["z"],
                "allOf": [bad],
            },
            is_strict=True,
        )
    assert sum(lengths) < 2 * schema_check.MAX_CHARACTERS


def test_only_the_compiling_thread_has_a_large_stack() -> None:
    def size() -> int:
        with llguidance.STACK_SIZE_LOCK:  # released when the stack size is restored
            return threading.stack_size()

    before = threading.stack_size()
    assert llguidance._run_with_large_stack(size) == before
    with pytest.raises(ZeroDivisionError):
        llguidance._run_with_large_stack(lambda: 1 // 0)
    assert threading.stack_size() == before
