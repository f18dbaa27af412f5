"""Schemas that cannot be enforced in full: every API answers and says so, or refuses by name where
the request is strict.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.fixtures.server import Served

HELLO = [{"role": "user", "content": "Once upon a time"}]
SCHEMA = {
    "type": "object",
    "properties": {"p": {"type": "string", "format": "phone", "maxLength": 3}},
    "required": ["p"],
}
NOTE = 'format "phone" at #/properties/p'
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "response_format": FORMAT},
    "/v1/completions": {"prompt": "x", "response_format": FORMAT},
    "/completion": {"prompt": "x", "json_schema": SCHEMA},
    "/v1/messages": {
        "messages": HELLO,
        "max_tokens": 60,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/v1/responses": {
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}},
    },
    "/api/chat": {"messages": HELLO, "format": SCHEMA},
    "/api/generate": {"prompt": "x", "format": SCHEMA},
}
CASE = Path(__file__).parents[2] / "cases" / "schemas" / "chat_required_uint32.json"


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    """Send a request to a served model."""
    url = served.v1.removesuffix("/v1") + path
    return httpx.post(url, json={"model": "tiny", **body}, timeout=60)


def read_last_document(path: str, response: httpx.Response) -> dict[str, Any]:
    """Return the last JSON object of a stream."""
    lines = [line for line in response.text.splitlines() if line.strip()]
    events = [line.removeprefix("data: ") for line in lines if not line.startswith("event:")]
    last = json.loads([event for event in events if event != "[DONE]"][-1])
    return last["response"] if path == "/v1/responses" else last


@pytest.mark.parametrize("path", REQUESTS)
def test_every_api_says_what_is_not_enforced(tiny: Served, path: str) -> None:
    body = REQUESTS[path]
    answer = post(tiny, path, stream=False, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["constraint"] == {"not_enforced": [NOTE]}
    streamed = post(tiny, path, stream=True, **body)
    assert read_last_document(path, streamed)["constraint"] == {"not_enforced": [NOTE]}


def test_answer_without_notes_has_no_field_for_them(tiny: Served) -> None:
    answer = post(
        tiny, "/v1/chat/completions", messages=HELLO, response_format={"type": "json_object"}
    )
    assert "constraint" not in answer.json()


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": HELLO,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "it", "strict": True, "schema": SCHEMA},
                },
            },
            "response_format.json_schema.schema",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "it",
                        "strict": True,
                        "schema": SCHEMA,
                    }
                },
            },
            "schema",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": HELLO,
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "call", "parameters": SCHEMA, "strict": True},
                    }
                ],
            },
            "function call",
        ),
    ],
)
def test_strict_request_is_refused_by_name(
    tiny: Served, path: str, body: dict[str, Any], name: str
) -> None:
    answer = post(tiny, path, **body)
    assert answer.status_code == 400
    assert name in answer.text
    assert json.dumps(NOTE)[1:-1] in answer.text


def test_odd_schema_of_a_tool_does_not_fail_the_request(serve: Callable[..., Served]) -> None:
    body = json.loads(CASE.read_text())
    body["max_tokens"] = 600
    served = serve(b"Well.", n_ctx=4096)
    answer = post(served, "/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["tool_calls"]
    body["tools"] += [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (
            ("broken", {"properties": []}),
            ("set", {"properties": {"a": {"type": "array", "uniqueItems": True}}}),
            ("empty", {"type": "string", "enum": [1]}),
        )
    ]
    answer = post(served, "/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    notes = answer.json()["constraint"]["not_enforced"]
    assert [note.split(":")[0] for note in notes] == [
        "function broken",
        "function set",
        "function empty",
    ]
    assert notes[1] == "function set: uniqueItems at #/properties/a"
