"""/v1/messages: complete and streamed responses, and errors, follow Anthropic's documentation."""

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
# docs.anthropic.com, Messages: the body of a response.
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


def post(served: Served, path: str = "messages", **body: Any) -> httpx.Response:
    request = {"model": "tiny", "max_tokens": 64, "messages": HELLO, **body}
    return httpx.post(
        f"{served.v1}/{path}", json=request, headers={"anthropic-version": "2023-06-01"}
    )


def complete_message(served: Served, **body: Any) -> dict[str, Any]:
    answer = post(served, **body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), MESSAGE)
    return answer.json()


def assemble_stream(served: Served, **body: Any) -> dict[str, Any]:
    """Return the message that a client assembles from the events of a stream."""
    answer = post(served, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    message: dict[str, Any] = {}
    partial_json: dict[int, str] = {}
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        event_data = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event_data['type']}"
        match event_data["type"]:
            case "message_start":
                message = event_data["message"]
                jsonschema.validate(message, MESSAGE)
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert event_data["index"] == len(message["content"])
                message["content"].append(event_data["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event_data["index"]], event_data["delta"]
                if delta["type"] == "input_json_delta":
                    partial_json[event_data["index"]] = (
                        partial_json.get(event_data["index"], "") + delta["partial_json"]
                    )
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if text := partial_json.get(event_data["index"]):
                    message["content"][event_data["index"]]["input"] = jiter.from_json(
                        text.encode(), partial_mode=True
                    )
            case "message_delta":
                message |= event_data["delta"] | {"usage": event_data["usage"]}
    assert event_data == {"type": "message_stop"}
    jsonschema.validate(message, MESSAGE)
    return message


def message_equal_to_stream(served: Served, **body: Any) -> dict[str, Any]:
    """Return the complete response, after comparing it with the stream. Ids and input token counts
    differ and are left out.
    """
    complete, streamed = complete_message(served, **body), assemble_stream(served, **body)
    for message in (complete, streamed):
        message["usage"] = message["usage"]["output_tokens"]
        message["id"] = ""
        for block in message["content"]:
            block.pop("id", None)
    assert complete == streamed
    return complete


def test_text_and_stop_reasons(serve: Callable[..., Served]) -> None:
    served = serve(b"hello world")
    assert message_equal_to_stream(served)["content"] == [{"type": "text", "text": "hello world"}]
    assert message_equal_to_stream(served)["stop_reason"] == "end_turn"
    assert message_equal_to_stream(served, max_tokens=3)["stop_reason"] == "max_tokens"
    stopped = message_equal_to_stream(served, stop_sequences=["zz", " wor"])
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == (
        "hello",
        "stop_sequence",
        " wor",
    )


def test_thinking_and_calls_are_blocks(serve: Callable[..., Served]) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}\n</tool_call>'
    served = serve(f"<think>\nhm\n</think>\n\nI look.\n{call}".encode(), n_ctx=2048)
    found = message_equal_to_stream(served, tools=TOOLS, max_tokens=500)
    assert found["content"] == [
        {"type": "thinking", "thinking": "hm\n", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"a": "yes"}},
    ]
    assert found["stop_reason"] == "tool_use"


def test_a_streamed_call_may_be_cut_off(
    serve: Callable[..., Served],
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": "yes", "b": [1, "two"]}}\n</tool_call> Well.'
    served = serve(call.encode(), n_ctx=2048)
    found = message_equal_to_stream(served, tools=TOOLS, max_tokens=500)
    assert found["content"][0]["input"] == {"a": "yes", "b": [1, "two"]}
    assert found["content"][1] == {"type": "text", "text": " Well."}
    stopped = message_equal_to_stream(served, tools=TOOLS, max_tokens=call.index("two") + 1)
    assert stopped["content"] == [
        {"type": "tool_use", "name": "weather", "input": {"a": "yes", "b": [1]}}
    ]
    assert stopped["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call_follows_its_schema(
    serve: Callable[..., Served], choice: dict[str, str]
) -> None:
    found = message_equal_to_stream(
        serve(b"Well.", n_ctx=2048),
        tools=TOOLS,
        tool_choice={**choice, "disable_parallel_tool_use": True},
        max_tokens=500,
    )
    (block,) = found["content"]
    assert block["type"] == "tool_use" and block["input"]["a"] in ("yes", "no")


def test_an_answer_schema_is_enforced_and_tokens_are_counted(tiny: Served) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert json.loads(complete_message(tiny, output_config=config)["content"][0]["text"])["a"] in (
        "yes",
        "no",
    )
    first, again = complete_message(tiny), complete_message(tiny)
    counted = post(tiny, "messages/count_tokens").json()
    for message in (first, again):
        assert (
            message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
            == counted["input_tokens"]
        )
    assert again["usage"]["cache_read_input_tokens"] > 0
    counted_by_openai_path = httpx.post(
        f"{tiny.v1}/chat/completions/input_tokens", json={"messages": HELLO}
    ).json()
    assert counted_by_openai_path == {
        "object": "response.input_tokens",
        "input_tokens": counted["input_tokens"],
    }


def test_a_conversation_of_blocks_reaches_the_model(serve: Callable[..., Served]) -> None:
    prompts: list[str] = []

    def next_token(tokens: list[int]) -> int:
        prompts.append(bytes(token for token in tokens if token < 256).decode())
        return 257

    system = [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind.", "cache_control": {}},
    ]
    messages = [
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
    complete_message(
        serve(next_token, n_ctx=2048),
        messages=messages,
        system=system,
        metadata={"user_id": "x"},
        service_tier="auto",
    )
    assert prompts[-1].startswith(
        "<system>Be brief.\n\nBe kind.\n<user>Hi\n<assistant>I look.\n<tool_call>"
    )
    assert prompts[-1].endswith(
        "<user><tool_response>\nsunny\n</tool_response>\n<user>So?\n<assistant>It is"
    )


@pytest.mark.parametrize(
    ("body", "message", "status", "error_type"),
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
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be one of", 400, None),
        ({"thinking": {"type": "much"}}, "thinking.type must be one of", 400, None),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported", 400, None),
        ({"beams": 2}, "beams are supported only by", 400, None),
        ({"n": 2}, "an answer is one message", 400, None),
    ],
)
def test_errors_have_anthropics_format(
    serve: Callable[..., Served],
    body: dict[str, Any],
    message: str,
    status: int,
    error_type: str | None,
) -> None:
    answer = post(serve(), **body)
    found = answer.json()
    assert (answer.status_code, found["type"]) == (status, "error")
    assert message in found["error"]["message"] and found["error"]["type"] == (
        error_type or "invalid_request_error"
    )


def test_a_refused_thread_says_so_as_anthropics_tool_runner_reads_it(
    serve: Callable[..., Served],
) -> None:
    error = post(serve(), thread={"type": "create"}).json()["error"]
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_the_key_is_read_from_anthropics_header(serve: Callable[..., Served]) -> None:
    served = serve(keys=("secret-key-1",))
    assert post(served).json()["error"]["type"] == "authentication_error"
    request = {"model": "tiny", "max_tokens": 8, "messages": HELLO}
    assert (
        httpx.post(
            f"{served.v1}/messages", json=request, headers={"x-api-key": "secret-key-1"}
        ).status_code
        == 200
    )
