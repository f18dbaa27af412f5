"""Describes the server's paths and request bodies as a document in the format OpenAPI 3.1."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from llmcli.api.bodies.base import EFFECT_KEY, RequestBody
from llmcli.api.bodies.reference import EFFECT_WORDS, NULL
from llmcli.api.errors import error_vendor

SCHEMA_PATH = "#/components/schemas/"
JSON_TYPE = "application/json"
INFO = (
    "What the server does with each field of a request is in the field's description and in"
    " `x-effect`: honored, ignored, noted (ignored, and the answer says so in `notes`) or refused."
)
TEXT = {"type": "string"}
OPENAI_ERROR = {
    "type": "object",
    "properties": {
        "message": TEXT,
        "type": TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
    "required": ["message", "type"],
}
ERRORS: dict[str, dict[str, Any]] = {
    "Error": {"type": "object", "properties": {"error": OPENAI_ERROR}, "required": ["error"]},
    "AnthropicError": {
        "type": "object",
        "properties": {"type": {"const": "error"}, "error": OPENAI_ERROR},
        "required": ["type", "error"],
    },
    "OllamaError": {"type": "object", "properties": {"error": TEXT}, "required": ["error"]},
}

# the vendor of a format of errors -> the name of its schema
ERROR_NAMES = {"OpenAI": "Error", "Anthropic": "AnthropicError", "ollama": "OllamaError"}


@dataclass(frozen=True, slots=True)
class Operation:
    """What requests to a path do. `path`: its variable parts are in braces. `body_type`: the model
    of the JSON body; None without one. `is_public`: requests need no API key.
    """

    path: str
    methods: Sequence[str]
    summary: str
    body_type: type[RequestBody] | None = None
    is_public: bool = False


def describe_api(operations: Iterable[Operation], version: str) -> dict[str, Any]:
    """Return the document for the operations of a server. `version`: that of the program."""
    operations = list(operations)
    types = list(dict.fromkeys(entry.body_type for entry in operations if entry.body_type))
    for body_type in types:
        body_type.build()
    _, definitions = models_json_schema(
        [(body_type, "validation") for body_type in types], ref_template=SCHEMA_PATH + "{model}"
    )
    schemas = {name: _describe_body(schema) for name, schema in definitions["$defs"].items()}
    paths: dict[str, dict[str, Any]] = {}
    for entry in operations:
        methods = paths.setdefault(entry.path, {})
        methods |= {method.lower(): _describe_operation(entry) for method in entry.methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmcli serve", "version": version, "description": INFO},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**schemas, **ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_operation(entry: Operation) -> dict[str, Any]:
    parts = [part[1:-1] for part in entry.path.split("/") if part.startswith("{")]
    error = {"schema": {"$ref": SCHEMA_PATH + ERROR_NAMES[error_vendor(entry.path)]}}
    operation: dict[str, Any] = {
        "summary": entry.summary,
        "security": [] if entry.is_public else [{"key": []}],
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error", "content": {JSON_TYPE: error}},
        },
    }
    if parts:
        operation["parameters"] = [
            {"name": part, "in": "path", "required": True, "schema": TEXT} for part in parts
        ]
    if entry.body_type:
        schema = {"$ref": SCHEMA_PATH + entry.body_type.__name__}
        operation["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": schema}}}
    return operation


def _describe_body(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a body with what the server does in the descriptions of fields, and
    null as a value of every field that is not required.
    """
    required = schema.get("required", ())
    properties = {
        name: _describe_field(field, name in required)
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _describe_field(field: Mapping[str, Any], is_required: bool) -> dict[str, Any]:
    described = {name: value for name, value in field.items() if name not in ("title", "default")}
    effect = described.get(EFFECT_KEY, "honored")
    described["description"] = f"{EFFECT_WORDS[effect]}{described.get('description', '')}"
    if is_required:
        return described
    if isinstance(described.get("type"), str):
        described["type"] = [described["type"], "null"]
    for name in ("anyOf", "oneOf"):
        if name in described and NULL not in described[name]:
            described[name] = [*described[name], NULL]
    return described
