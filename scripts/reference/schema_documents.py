"""Shared by the scripts on JSON schemas: grammars over bytes, random documents that a grammar
accepts, and jsonschema as the judge of documents.
"""

import json
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import regex

from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.constraint.compile import GrammarCompiler
from tests.fixtures.fakes import EOS, N_VOCAB, FakeModel

CLOSING = frozenset(b'"}]')
MAX_BYTES = 600  # of a random document


def refuse_native(constraint: Constraint) -> Grammar:
    """Raise AssertionError: a model of bytes has no grammars of llama.cpp."""
    raise AssertionError(constraint)


GRAMMARS = GrammarCompiler(FakeModel(), refuse_native)


def compile_schema(schema: Any, is_strict: bool) -> Grammar:
    """Return the grammar of a schema over bytes. Raises UserError if it is refused."""
    return GRAMMARS(Constraint("json_schema", json.dumps(schema), is_strict=is_strict))


def encode(document: Any) -> list[int]:
    """Return the tokens of a document, which are its bytes."""
    return list(json.dumps(document, ensure_ascii=False).encode())


def write_randomly(grammar: Grammar, numbers: random.Random) -> bytes | None:
    """Return a random text that the grammar accepts. Return None if the text does not end within
    MAX_BYTES bytes. Brackets and strings are closed early, more so in a long text.
    """
    matcher, document = grammar.start(), bytearray()
    while len(document) < MAX_BYTES:
        bits = np.unpackbits(matcher.mask(), count=N_VOCAB, bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            return None
        eagerness = 0.3 + 0.6 * len(document) / MAX_BYTES
        if EOS in allowed and (allowed == [EOS] or numbers.random() < eagerness):
            return bytes(document)
        letters = [token for token in allowed if token != EOS]
        closing = [token for token in letters if token in CLOSING]
        token = numbers.choice(closing if closing and numbers.random() < eagerness else letters)
        matcher.accept(token)
        document.append(token)
    return None


def make_judge(schema: Any) -> Any:
    """Return jsonschema's validator of a schema, which also checks formats."""
    schema = _allow_null(schema)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind = jsonschema.validators.extend(
        kind, {"pattern": _check_pattern, "multipleOf": _check_multiple}
    )
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def _allow_null(schema: Any) -> Any:
    """Return a schema in which OpenAPI's `nullable` is written as an alternative."""
    if isinstance(schema, list):
        return [_allow_null(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _allow_null(value) for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") is True:
        return {"anyOf": [inner, {"type": "null"}]}
    return inner if "nullable" not in schema or schema["nullable"] is False else _keep(schema)


def _keep(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a table of properties, of which one is called `nullable`."""
    return {key: _allow_null(value) for key, value in schema.items()}


def _check_pattern(
    _: Any, pattern: str, value: Any, __: Any
) -> Iterator[jsonschema.ValidationError]:
    """Validate `pattern` with the package regex, because re has no Unicode classes."""
    # In ECMA's syntax \w and \d are about ASCII, but \s is not.
    flags = 0 if regex.search(r"\\[sSpP]", pattern) else regex.ASCII
    if isinstance(value, str) and "\ufeff" not in value and not regex.search(pattern, value, flags):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _check_multiple(
    _: Any, step: float, value: Any, __: Any
) -> Iterator[jsonschema.ValidationError]:
    """Validate `multipleOf` in decimal numbers, because a remainder of floats is inexact."""
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and Fraction(repr(value)) % Fraction(repr(step))
    ):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {step}")
