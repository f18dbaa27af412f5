"""The documented calls of the Python client anthropic, run against the server's /v1/messages."""

import sys
from typing import Any

import anthropic

from scripts.clients.calls import MODEL, call, needs_only_model, refuses, run

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "Of a city", "input_schema": SCHEMA}]
HELLO: Any = [{"role": "user", "content": "Weather in Paris?"}]
ARGS: Any = {"model": MODEL, "max_tokens": 60, "messages": HELLO}


@call
def create(a: anthropic.Anthropic) -> None:
    """messages.create with system, stop_sequences, and temperature and top_k in extra_body"""
    more = {"temperature": 0.5, "top_k": 20}
    message = a.messages.create(**ARGS, system="Be brief.", stop_sequences=["zzz"], extra_body=more)
    assert message.content[0].text and message.usage.output_tokens > 0


@call
def stream(a: anthropic.Anthropic) -> None:
    """messages.stream: text_stream, get_final_message"""
    with a.messages.stream(**ARGS) as message_stream:
        text = "".join(message_stream.text_stream)
        assert message_stream.get_final_message().content[0].text == text


@call
async def stream_async(a: anthropic.Anthropic) -> None:
    """AsyncAnthropic: messages.create(stream=True)"""
    async with anthropic.AsyncAnthropic(base_url=a.base_url, api_key="none", max_retries=0) as b:
        kinds = [event.type async for event in await b.messages.create(**ARGS, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@call
def tools(a: anthropic.Anthropic) -> None:
    """tools with a forced tool_choice, complete and streamed, and a tool_result"""
    choice: Any = {"type": "tool", "name": "weather"}
    message = a.messages.create(**ARGS, tools=TOOLS, tool_choice=choice)
    block = message.content[-1]
    assert message.stop_reason == "tool_use" and block.input["city"] in ("Paris", "Rome")
    with a.messages.stream(**ARGS, tools=TOOLS, tool_choice=choice) as message_stream:
        assert message_stream.get_final_message().content[-1].name == "weather"
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert a.messages.create(**{**ARGS, "messages": messages}, tools=TOOLS).usage.input_tokens > 0


@call
def count(a: anthropic.Anthropic) -> None:
    """messages.count_tokens"""
    assert a.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 3


@refuses
def image(a: anthropic.Anthropic) -> None:
    """an image in a message"""
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    a.messages.create(
        **{**ARGS, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    )


@needs_only_model
def other_model(a: anthropic.Anthropic) -> None:
    """the name of no model, which an only model answers"""
    assert a.messages.create(**{**ARGS, "model": "other"}).model == MODEL


@call
def server_tool(a: anthropic.Anthropic) -> None:
    """a tool that only Anthropic's server runs, which is left out with a note"""
    tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    message: Any = a.messages.create(**ARGS, tools=[tool])
    assert "web_search" in message.notes[0]


run(anthropic.Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="none", max_retries=0))
