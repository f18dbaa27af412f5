"""The models of request bodies have every field of the APIs' references."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmcli.api.bodies.base import RequestBody
from llmcli.api.bodies.generation_fields import GenerationBody
from llmcli.api.bodies.reference import field_rows, inner_bodies, own_rows, value_words
from llmcli.api.conversation.messages import ChatMessage, ContentPart
from llmcli.api.forms.anthropic_blocks import ContentBlock, DocumentSource
from llmcli.api.forms.conversation_form import ChatBody
from llmcli.api.forms.ollama import OllamaOptions
from llmcli.serve.http.routes import ROUTES

FOLDER = Path(__file__).parents[2] / "data" / "api_references"
REFERENCES = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]
VENDORS = {"OpenAI", "Anthropic", "ollama", "llama-server", "vLLM"}


def body_of(path: str) -> type[RequestBody]:
    """Return the model of the requests to a path."""
    body_type = next(
        route.body_type for route in ROUTES.values() if path in (route.path, *route.further_paths)
    )
    assert body_type is not None
    return body_type


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda entry: str(entry["reference"]))
def test_every_field_of_a_reference_is_honored_accepted_or_refused(
    reference: dict[str, Any],
) -> None:
    known = body_of(reference["path"]).effects()
    assert [name for name in reference["fields"] if name not in known] == []
    assert all(known[name].description for name in reference["fields"])
    options = OllamaOptions.effects()
    assert [name for name in reference.get("options", ()) if name not in options] == []


def test_there_is_a_reference_of_every_api() -> None:
    named = {vendor for vendor in VENDORS for entry in REFERENCES if vendor in entry["reference"]}
    assert named == VENDORS


def test_rows_have_the_fields_of_a_body_with_their_values_and_origins() -> None:
    rows = {row.name: row for row in field_rows(ChatBody)}
    assert rows.keys() == ChatBody.effects().keys()
    assert rows["n"].values == "whole number from 1 to 128"
    assert (rows["grammar"].origin, rows["stop_token_ids"].origin) == ("llama-server", "vLLM")
    assert rows["messages"].description == "The conversation; required"
    assert rows["modalities"].description.startswith("Refused: ")
    assert rows["modalities"].description.endswith("accepted: [text]")
    assert rows["cache_prompt"].description.startswith("No effect: ")


def test_own_rows_leave_out_the_fields_that_all_generating_apis_share() -> None:
    own = {row.name for row in own_rows(ChatBody, (GenerationBody,))}
    shared = {row.name for row in field_rows(GenerationBody)}
    assert "messages" in own
    assert "temperature" not in own
    assert own | shared == ChatBody.effects().keys()


def test_inner_bodies_are_found_at_any_depth_and_once() -> None:
    found = inner_bodies(ChatBody)
    assert {ChatMessage, ContentPart} <= set(found)
    assert len(set(found)) == len(found)
    assert inner_bodies(ContentBlock) == (DocumentSource,)  # a block contains blocks
    assert {row.name for row in field_rows(ContentBlock)} == ContentBlock.effects().keys()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "any"),
        ({"type": ["number", "null"]}, "number"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ({"const": True}, "true"),
        ({"enum": ["a", 1]}, "one of a, 1"),
        ({"$ref": "#/$defs/Tool"}, "object `Tool`"),
        (
            {"type": "array", "items": {"type": "object"}, "maxItems": 3},
            "list of object, at most 3",
        ),
        ({"type": "integer", "minimum": 0, "maximum": 2**53}, "whole number, at least 0"),
    ],
)
def test_values_in_words(schema: dict[str, Any], words: str) -> None:
    assert value_words(schema) == words
