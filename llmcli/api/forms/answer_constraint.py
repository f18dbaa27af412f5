"""Reads what a request demands of the form of its answer: a JSON schema, a grammar, a regular
expression, a choice of texts, or a set of tokens. A request may have one such demand.
"""

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from llmcli.api.bodies.base import RequestBody, honored, ignored
from llmcli.api.bodies.generation_fields import GenerationBody
from llmcli.api.conversation.tools import ANY_OBJECT
from llmcli.api.errors import ApiError
from llmcli.errors import UserError
from llmcli.runtime.constraint import gbnf
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.json_schema import check as schema_check
from llmcli.runtime.constraint.tool_calls import AnswerSchema
from llmcli.strict_json import parse_strict_json

GBNF_MARK = "::="  # of every rule in GBNF, and of none in Lark
GBNF_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class NamedSchema(RequestBody):
    """A JSON schema with a name."""

    origin: ClassVar[str] = "OpenAI"
    schema_: Any = honored("the JSON schema", alias="schema")
    strict: bool | None = honored("refuse a schema of which something cannot be enforced")
    name: Any = ignored("the name has no effect")
    description: Any = ignored("the model does not see the schema")


class ResponseFormat(NamedSchema):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"] | None = honored(
        "text, any JSON object, or JSON of a schema"
    )
    json_schema: NamedSchema | None = honored("the schema, in chat completions")


def read_answer_schema(
    response_format: ResponseFormat | None, path: str, is_nested: bool = True
) -> AnswerSchema | None:
    """Return the JSON schema of a `response_format`, or None for a free text. `path`: the field's
    path in the request. `is_nested`: the schema must be in a field `json_schema`.

    Raises ApiError for a schema that is invalid, or that is strict and cannot be enforced.
    """
    if response_format is None or response_format.type in (None, "text"):
        return None
    if response_format.type == "json_object":
        if response_format.schema_ is None:
            return AnswerSchema(ANY_OBJECT)
        return check_schema(response_format.schema_, f"{path}.schema")
    inner: NamedSchema = response_format.json_schema or response_format
    if response_format.json_schema is not None:
        path = f"{path}.json_schema"
    elif is_nested and response_format.schema_ is None:
        raise ApiError(f"{path}.json_schema is missing", param=f"{path}.json_schema")
    if inner.schema_ is None:
        raise ApiError(f"{path}.schema is missing", param=f"{path}.schema")
    return check_schema(inner.schema_, f"{path}.schema", bool(inner.strict))


def check_schema(value: Any, path: str, is_strict: bool = False) -> AnswerSchema:
    """Return a JSON schema of a request. `path`: its path there. Raises ApiError if it is invalid,
    or if it `is_strict` and cannot be enforced.
    """
    try:
        schema_check.check_schema(json.dumps(value), is_strict)
    except (UserError, RecursionError) as error:
        raise ApiError(f"{path}: {error}", param=path) from None
    return AnswerSchema(value, is_strict)


def read_constraint(
    body: GenerationBody, schema: AnswerSchema | None = None, schema_field: str = "response_format"
) -> AnswerSchema | Constraint | None:
    """Return the form that the answer must have, or None. `schema`: the schema in the field
    `schema_field` of the request's API. Raises ApiError if the request has several forms.
    """
    forms = [*([(schema_field, schema)] if schema else []), *_read_forms(body)]
    if len(forms) > 1:
        (first, _), (second, _), *_ = forms
        raise ApiError(
            f"{first} and {second} both constrain the answer: leave one out", param=second
        )
    return forms[0][1] if forms else None


def _read_forms(body: GenerationBody) -> Iterator[tuple[str, AnswerSchema | Constraint]]:
    """Yield each form of the answer in the fields of llama-server and vLLM, with its path."""
    if body.json_schema is not None:
        yield "json_schema", check_schema(body.json_schema, "json_schema")
    if body.grammar:
        yield "grammar", _read_gbnf(body.grammar, "grammar")
    if body.guided_json is not None:
        yield "guided_json", _read_schema_or_text(body.guided_json, "guided_json")
    if body.guided_regex:
        yield "guided_regex", Constraint("regex", body.guided_regex)
    if body.guided_choice:
        yield "guided_choice", _read_choice(body.guided_choice, "guided_choice")
    if body.guided_grammar:
        yield "guided_grammar", _read_grammar(body.guided_grammar, "guided_grammar")
    if outputs := body.structured_outputs:
        path = "structured_outputs"
        if outputs.json_ is not None:
            yield f"{path}.json", _read_schema_or_text(outputs.json_, f"{path}.json")
        if outputs.regex:
            yield f"{path}.regex", Constraint("regex", outputs.regex)
        if outputs.choice:
            yield f"{path}.choice", _read_choice(outputs.choice, f"{path}.choice")
        if outputs.grammar:
            yield f"{path}.grammar", _read_grammar(outputs.grammar, f"{path}.grammar")
        if outputs.json_object:
            yield f"{path}.json_object", AnswerSchema(ANY_OBJECT)
    if body.allowed_token_ids:
        yield "allowed_token_ids", Constraint("tokens", json.dumps(body.allowed_token_ids))


def _read_schema_or_text(value: Any, path: str) -> AnswerSchema:
    """Return a JSON schema, which may be written as a JSON text."""
    if isinstance(value, str):
        try:
            value = parse_strict_json(value)
        except (ValueError, RecursionError):
            raise ApiError(f"{path} must be a JSON schema or its text", param=path) from None
    return check_schema(value, path)


def _read_gbnf(text: str, path: str) -> Constraint:
    try:
        gbnf.to_lark(text)
    except UserError as error:
        raise ApiError(f"{path}: {error}", param=path) from None
    return Constraint("gbnf", text)


def _read_grammar(text: str, path: str) -> Constraint:
    """Return the constraint of a grammar in GBNF or in Lark."""
    return _read_gbnf(text, path) if GBNF_MARK in text else Constraint("lark", text)


def _read_choice(texts: list[str], path: str) -> Constraint:
    """Return the constraint of an answer that is one of `texts`."""
    if not all(texts):
        raise ApiError(f"{path} has an empty text", param=path)
    literals = " | ".join(f'"{_escape(text)}"' for text in texts)
    return _read_gbnf(f"root ::= {literals}", path)


def _escape(text: str) -> str:
    """Return a text as it is written in a literal of GBNF."""
    return "".join(
        GBNF_ESCAPES.get(letter) or (letter if letter.isprintable() else f"\\U{ord(letter):08x}")
        for letter in text
    )
