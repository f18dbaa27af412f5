"""/v1/messages: Anthropic's documented shapes, streamed and not, and its errors."""

import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import jiter
import jsonschema
import pytest

from tests.fixtures.server import Served

HELLO = [{"role": "user", "content": "Once upon a time"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "Of a day", "input_schema": SCHEMA}]
COUNTS = {
    "type": "object",
    "required": ["input_tokens", "output_tokens", "cache_read_input_tokens"],
    "additionalProperties": {"type": "integer", "minimum": 0},
}
BLOCK = {
    "oneOf": [
        {
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        },
        {
            "properties": {
                "type": {"const": "thinking"},
                "thinking": {"type": "string"},
                "signature": {"type": "string"},
            },
            "required": ["type", "thinking", "signature"],
        },
        {
            "properties": {
                "type": {"const": "tool_use"},
                "id": {"type": "string"},
                "name": {"type": "string"},
                "input": {"type": "object"},
            },
            "required": ["type", "id", "name", "input"],
        },
    ]
}
# docs.anthropic.com, Messages: the body of an answer.
MESSAGE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "pattern": "^msg_"},
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": {"type": "string"},
        "content": {"type": "array", "items": BLOCK},
        "usage": COUNTS,
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]},
        "stop_sequence": {"type": ["string", "null"]},
    },
}
MESSAGE["required"] = list(MESSAGE["properties"])


def ask(served: Served, path: str = "messages", **body: Any) -> httpx.Response:
    asked = {"model": "tiny", "max_tokens": 64, "messages": HELLO, **body}
    return httpx.post(
        f"{served.v1}/{path}", json=asked, headers={"anthropic-version": "2023-06-01"}
    )


def whole(served: Served, **body: Any) -> dict[str, Any]:
    answer = ask(served, **body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), MESSAGE)
    return answer.json()


def built(served: Served, **body: Any) -> dict[str, Any]:
    """A message put together of a stream's events, as their clients do it."""
    answer = ask(served, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    message: dict[str, Any] = {}
    parts: dict[int, str] = {}
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        match told["type"]:
            case "message_start":
                message = told["message"]
                jsonschema.validate(message, MESSAGE)
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert told["index"] == len(message["content"])
                message["content"].append(told["content_block"])
            case "content_block_delta":
                block, delta = message["content"][told["index"]], told["delta"]
                if delta["type"] == "input_json_delta":
                    parts[told["index"]] = parts.get(told["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if text := parts.get(told["index"]):
                    message["content"][told["index"]]["input"] = jiter.from_json(
                        text.encode(), partial_mode=True
                    )
            case "message_delta":
                message |= told["delta"] | {"usage": told["usage"]}
    assert told == {"type": "message_stop"}
    jsonschema.validate(message, MESSAGE)
    return message


def same(served: Served, **body: Any) -> dict[str, Any]:
    """The whole answer, which the stream's must equal but for what is new each time."""
    one, other = whole(served, **body), built(served, **body)
    for message in (one, other):
        message["usage"] = message["usage"]["output_tokens"]
        message["id"] = ""
        for block in message["content"]:
            block.pop("id", None)
    assert one == other
    return one


def test_text_and_why_it_ended(serve: Callable[..., Served]) -> None:
    served = serve(b"hello world")
    assert same(served)["content"] == [{"type": "text", "text": "hello world"}]
    assert same(served)["stop_reason"] == "end_turn"
    assert same(served, max_tokens=3)["stop_reason"] == "max_tokens"
    cut = same(served, stop_sequences=["zz", " wor"])
    assert (cut["content"][0]["text"], cut["stop_reason"], cut["stop_sequence"]) == (
        "hello",
        "stop_sequence",
        " wor",
    )


def test_thinking_and_calls_are_blocks(serve: Callable[..., Served]) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}\n</tool_call>'
    served = serve(f"<think>\nhm\n</think>\n\nI look.\n{call}".encode(), n_ctx=2048)
    found = same(served, tools=TOOLS, max_tokens=500)
    assert found["content"] == [
        {"type": "thinking", "thinking": "hm\n", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"a": "yes"}},
    ]
    assert found["stop_reason"] == "tool_use"


def test_a_call_comes_in_pieces_and_one_that_is_cut_off_as_far_as_it_came(
    serve: Callable[..., Served],
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": "yes", "b": [1, "two"]}}\n</tool_call> Well.'
    served = serve(call.encode(), n_ctx=2048)
    found = same(served, tools=TOOLS, max_tokens=500)
    assert found["content"][0]["input"] == {"a": "yes", "b": [1, "two"]}
    assert found["content"][1] == {"type": "text", "text": " Well."}
    cut = same(served, tools=TOOLS, max_tokens=call.index("two") + 1)
    assert cut["content"] == [
        {"type": "tool_use", "name": "weather", "input": {"a": "yes", "b": [1]}}
    ]
    assert cut["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_must_be_is_held_to_its_schema(tiny: Served, choice: dict[str, str]) -> None:
    found = same(tiny, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
    (block,) = found["content"]
    assert block["type"] == "tool_use" and block["input"]["a"] in ("yes", "no")


def test_a_form_is_kept_and_counts_are_told(tiny: Served) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert json.loads(whole(tiny, output_config=config)["content"][0]["text"])["a"] in ("yes", "no")
    first, again = whole(tiny), whole(tiny)
    counted = ask(tiny, "messages/count_tokens").json()
    for one in (first, again):
        assert (
            one["usage"]["input_tokens"] + one["usage"]["cache_read_input_tokens"]
            == counted["input_tokens"]
        )
    assert again["usage"]["cache_read_input_tokens"] > 0
    more = httpx.post(f"{tiny.v1}/chat/completions/input_tokens", json={"messages": HELLO}).json()
    assert more == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}


def test_a_conversation_of_blocks_reaches_the_model(serve: Callable[..., Served]) -> None:
    said: list[str] = []

    def speak(tokens: list[int]) -> int:
        said.append(bytes(token for token in tokens if token < 256).decode())
        return 257

    system = [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind.", "cache_control": {}},
    ]
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "sunny"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    whole(
        serve(speak, n_ctx=2048),
        messages=talk,
        system=system,
        metadata={"user_id": "x"},
        service_tier="auto",
    )
    assert said[-1].startswith(
        "<system>Be brief.\n\nBe kind.\n<user>Hi\n<assistant>I look.\n<tool_call>"
    )
    assert said[-1].endswith(
        "<user><tool_response>\nsunny\n</tool_response>\n<user>So?\n<assistant>It is"
    )


@pytest.mark.parametrize(
    ("body", "told", "status", "sort"),
    [
        ({"messages": None}, "messages is missing", 400, "invalid_request_error"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "role must be one of",
            400,
            "invalid_request_error",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "text or a list of blocks",
            400,
            "invalid_request_error",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "reads only text, not image",
            400,
            None,
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "x"}]},
            "tools of type web_search_20250305 are not supported",
            400,
            None,
        ),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be one of", 400, None),
        ({"thinking": {"type": "much"}}, "thinking.type must be one of", 400, None),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported", 400, None),
        ({"beams": 2}, "beams are supported only by", 400, None),
        ({"n": 2}, "an answer is one message", 400, None),
        ({"model": "other"}, "not served here", 404, "not_found_error"),
    ],
)
def test_errors_are_theirs(
    serve: Callable[..., Served], body: dict[str, Any], told: str, status: int, sort: str | None
) -> None:
    answer = ask(serve(), **body)
    found = answer.json()
    assert (answer.status_code, found["type"]) == (status, "error")
    assert told in found["error"]["message"] and found["error"]["type"] == (
        sort or "invalid_request_error"
    )


def test_a_key_comes_in_their_header(serve: Callable[..., Served]) -> None:
    served = serve(keys=("secret-key-1",))
    assert ask(served).json()["error"]["type"] == "authentication_error"
    asked = {"model": "tiny", "max_tokens": 8, "messages": HELLO}
    assert (
        httpx.post(
            f"{served.v1}/messages", json=asked, headers={"x-api-key": "secret-key-1"}
        ).status_code
        == 200
    )
