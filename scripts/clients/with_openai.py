"""The calls in openai-python's README and guides, run against the server: chat, streams, async,
tools, parsing, responses, files, batches, errors.
"""

import asyncio
import json
import re
import sys
import time
from typing import Any

import openai
from openai import AsyncOpenAI, ConflictError, OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from scripts.clients.calls import MODEL, OTHER_MODELS, call, needs_only_model, refuses, run

URL = sys.argv[1]
M = MODEL
HI: Any = [{"role": "user", "content": "Say this is a test"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Of a city",
            "strict": True,
            "parameters": SCHEMA,
        },
    }
]
FLAT: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Of a city",
        "strict": True,
        "parameters": SCHEMA,
    }
]


class Step(BaseModel):
    """A step of a solution."""

    number: int
    good: bool


class Solution(BaseModel):
    """An answer with nested objects, for structured outputs."""

    steps: list[Step]
    final: int


@call
def chat(c: OpenAI) -> None:
    """chat.completions.create"""
    found = c.chat.completions.create(model=M, messages=HI, max_tokens=16)
    assert isinstance(found.choices[0].message.content, str)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


@call
def chat_system(c: OpenAI) -> None:
    """chat with a developer message and with text parts"""
    parts: Any = [{"type": "text", "text": "Say"}, {"type": "text", "text": " hello"}]
    messages: Any = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": parts},
    ]
    assert (
        c.chat.completions.create(model=M, messages=messages, max_completion_tokens=8)
        .choices[0]
        .finish_reason
    )


@call
def chat_stream(c: OpenAI) -> None:
    """chat.completions.create(stream=True)"""
    text = [
        item.choices[0].delta.content or ""
        for item in c.chat.completions.create(model=M, messages=HI, max_tokens=16, stream=True)
    ]
    assert len(text) > 3
    assert "".join(text)


@call
def chat_usage(c: OpenAI) -> None:
    """chat with stream_options={"include_usage": True}"""
    stream = c.chat.completions.create(
        model=M, messages=HI, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    last = list(stream)[-1]
    assert last.choices == []
    assert last.usage.completion_tokens <= 4


@call
def chat_stream_helper(c: OpenAI) -> None:
    """chat.completions.stream (events)"""
    with c.chat.completions.stream(
        model=M, messages=HI, max_tokens=400, stop=["t", "\n"]
    ) as stream:
        kinds = {event.type for event in stream}
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert stream.get_final_completion().choices[0].message.content


@call
async def chat_async(c: OpenAI) -> None:
    """AsyncOpenAI: three chats at the same time"""
    async with AsyncOpenAI(base_url=URL, api_key="x") as a:
        found = await asyncio.gather(
            *(a.chat.completions.create(model=M, messages=HI, max_tokens=8) for _ in range(3))
        )
        assert all(item.choices[0].message.content for item in found)


@call
async def chat_async_stream(c: OpenAI) -> None:
    """AsyncOpenAI: chat with stream=True"""
    async with AsyncOpenAI(base_url=URL, api_key="x") as a:
        stream = await a.chat.completions.create(model=M, messages=HI, max_tokens=8, stream=True)
        assert [item async for item in stream]


@call
def sampling(c: OpenAI) -> None:
    """chat with temperature, top_p, penalties, seed, stop, logit_bias, user, metadata, store"""
    args: Any = {
        "model": M,
        "messages": HI,
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "seed": 7,
        "frequency_penalty": 0.1,
        "stop": ["\n\n"],
        "logit_bias": {"5": -100},
        "user": "me",
        "max_tokens": 12,
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
    }
    first, second = (c.chat.completions.create(**args).choices[0].message.content for _ in range(2))
    assert first == second


@call
def several_choices(c: OpenAI) -> None:
    """chat with n=3"""
    assert [
        item.index
        for item in c.chat.completions.create(model=M, messages=HI, n=3, max_tokens=6).choices
    ] == [
        0,
        1,
        2,
    ]


@call
def logprobs(c: OpenAI) -> None:
    """chat with logprobs and top_logprobs"""
    found = c.chat.completions.create(
        model=M, messages=HI, logprobs=True, top_logprobs=3, max_tokens=4
    )
    assert all(
        len(item.top_logprobs) == 3 and item.logprob <= 0
        for item in found.choices[0].logprobs.content
    )


@call
def stop(c: OpenAI) -> None:
    """chat with stop: the stop string is not part of the answer"""
    found = c.chat.completions.create(model=M, messages=HI, stop=["e"], max_tokens=40).choices[0]
    assert "e" not in found.message.content


@call
def tools_auto(c: OpenAI) -> None:
    """chat with tools and tool_choice auto or none"""
    for choice in ("auto", "none"):
        found = c.chat.completions.create(
            model=M, messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=20
        )
        assert found.choices[0].finish_reason in ("stop", "length", "tool_calls")


@call
def tools_required(c: OpenAI) -> None:
    """chat with tool_choice required, and a tool result sent back"""
    found = c.chat.completions.create(
        model=M,
        messages=HI,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
        parallel_tool_calls=False,
    )
    assert found.choices[0].finish_reason == "tool_calls"
    tool = found.choices[0].message.tool_calls[0]
    assert set(json.loads(tool.function.arguments)) == {"city"}
    messages: Any = [
        *HI,
        found.choices[0].message,
        {"role": "tool", "tool_call_id": tool.id, "content": "sunny"},
    ]
    assert c.chat.completions.create(model=M, messages=messages, tools=TOOLS, max_tokens=12).choices


@call
def tools_named_stream(c: OpenAI) -> None:
    """chat with tool_choice naming one function, streamed"""
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    stream = c.chat.completions.create(
        model=M, messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=200, stream=True
    )
    deltas = [tool for item in stream for tool in item.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "get_weather"
    assert deltas[0].id
    json.loads("".join(item.function.arguments or "" for item in deltas))


@call
def tools_parse(c: OpenAI) -> None:
    """chat.completions.parse with openai.pydantic_function_tool"""
    tool: Any = openai.pydantic_function_tool(Step)
    found = c.chat.completions.parse(
        model=M,
        messages=HI,
        tools=[tool],
        tool_choice="required",
        max_tokens=300,
        parallel_tool_calls=False,
    )
    assert isinstance(found.choices[0].message.tool_calls[0].function.parsed_arguments, Step)


@call
def parse(c: OpenAI) -> None:
    """chat.completions.parse(response_format=Model)"""
    answer_model = type("Answer", (BaseModel,), {"__annotations__": {"good": bool, "number": int}})
    found = c.chat.completions.parse(
        model=M, messages=HI, response_format=answer_model, max_tokens=200
    )
    assert isinstance(found.choices[0].message.parsed, answer_model)


@call
def parse_stream(c: OpenAI) -> None:
    """chat.completions.stream(response_format=Model)"""
    with c.chat.completions.stream(
        model=M, messages=HI, response_format=Step, max_tokens=200
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Step)


@call
def json_object(c: OpenAI) -> None:
    """chat with response_format json_object"""
    found = c.chat.completions.create(
        model=M, messages=HI, response_format={"type": "json_object"}, max_tokens=60
    )
    assert found.choices[0].message.content.startswith("{")


@call
def json_schema(c: OpenAI) -> None:
    """chat with response_format json_schema: strict, nested by $defs"""
    schema: Any = {
        "name": "it",
        "strict": True,
        "schema": openai.lib._pydantic.to_strict_json_schema(Solution),
    }
    found = c.chat.completions.create(
        model=M,
        messages=HI,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert re.match(r'\{\s*"steps":\s*\[', found.choices[0].message.content)


@call
def completion(c: OpenAI) -> None:
    """completions.create: plain, streamed, with logprobs, echo, best_of, several prompts"""
    assert c.completions.create(model=M, prompt="Once", max_tokens=8).choices[0].text
    assert list(c.completions.create(model=M, prompt="Once", max_tokens=8, stream=True))
    assert (
        len(
            c.completions.create(model=M, prompt="Once", max_tokens=4, logprobs=2)
            .choices[0]
            .logprobs.tokens
        )
        == 4
    )
    assert (
        c.completions.create(model=M, prompt="Once", max_tokens=4, echo=True)
        .choices[0]
        .text.startswith("Once")
    )
    assert (
        len(c.completions.create(model=M, prompt=["a", "b"], max_tokens=4, n=2, best_of=3).choices)
        == 4
    )


@call
def response(c: OpenAI) -> None:
    """responses.create(instructions, input)"""
    found = c.responses.create(
        model=M, instructions="You talk like a pirate.", input="Hello", max_output_tokens=16
    )
    assert found.output_text
    assert found.usage.output_tokens <= 16


@call
def response_items(c: OpenAI) -> None:
    """responses.create with a conversation as input items"""
    first = c.responses.create(
        model=M, input=[{"role": "user", "content": "knock knock."}], max_output_tokens=16
    )
    items: Any = [
        {"role": "user", "content": "knock knock."},
        *first.output,
        {"role": "user", "content": "who?"},
    ]
    assert c.responses.create(model=M, input=items, max_output_tokens=16).output_text


@call
def response_stream(c: OpenAI) -> None:
    """responses.create(stream=True)"""
    events = list(c.responses.create(model=M, input="Hello", max_output_tokens=16, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


@call
def response_stream_helper(c: OpenAI) -> None:
    """responses.stream with text_format, and get_final_response"""
    with c.responses.stream(
        model=M, input="Hello", text_format=Step, max_output_tokens=300
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Step)


@call
async def response_async(c: OpenAI) -> None:
    """AsyncOpenAI: responses.create(stream=True)"""
    async with AsyncOpenAI(base_url=URL, api_key="x") as a:
        stream = await a.responses.create(model=M, input="Hello", max_output_tokens=8, stream=True)
        assert [event async for event in stream]


@call
def response_parse(c: OpenAI) -> None:
    """responses.parse(text_format=Model)"""
    assert isinstance(
        c.responses.parse(
            model=M, input="Hello", text_format=Step, max_output_tokens=200
        ).output_parsed,
        Step,
    )


@call
def response_tools(c: OpenAI) -> None:
    """responses.create with function tools, and a tool result sent back"""
    found = c.responses.create(
        model=M,
        input="Weather in Rome?",
        tools=FLAT,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    tool: Any = found.output[0]
    assert (tool.type, tool.name) == ("function_call", "get_weather")
    items: Any = [
        {"role": "user", "content": "Weather?"},
        *found.output,
        {"type": "function_call_output", "call_id": tool.call_id, "output": "sunny"},
    ]
    assert c.responses.create(model=M, input=items, tools=FLAT, max_output_tokens=12).output


@call
def embeddings(c: OpenAI) -> None:
    """embeddings.create with several inputs; encoding_format float agrees with base64"""
    found = c.embeddings.create(model=M, input=["one", "two"])
    assert len(found.data) == 2
    assert abs(sum(value * value for value in found.data[0].embedding) - 1) < 1e-3
    plain = c.embeddings.create(model=M, input="one", encoding_format="float")
    assert (
        max(
            abs(a - b)
            for a, b in zip(plain.data[0].embedding, found.data[0].embedding, strict=True)
        )
        < 1e-3
    )


@call
def models(c: OpenAI) -> None:
    """models.list as an iterator over pages, models.retrieve"""
    assert {item.id for item in c.models.list()} == {M, *OTHER_MODELS}
    assert c.models.retrieve(M).id == M


@call
def raw(c: OpenAI) -> None:
    """with_raw_response, with_streaming_response"""
    found = c.chat.completions.with_raw_response.create(model=M, messages=HI, max_tokens=4)
    assert found.headers["content-type"].startswith("application/json")
    assert found.parse().choices
    with c.chat.completions.with_streaming_response.create(
        model=M, messages=HI, max_tokens=4
    ) as streamed:
        assert list(streamed.iter_lines())


@call
def options(c: OpenAI) -> None:
    """with_options(timeout, max_retries), extra_headers, extra_query, extra_body"""
    found = c.with_options(timeout=60, max_retries=1).chat.completions.create(
        model=M,
        messages=HI,
        max_tokens=4,
        extra_headers={"x-a": "b"},
        extra_query={"c": "d"},
        extra_body={"top_k": 5},
    )
    assert found.choices


@call
def errors(c: OpenAI) -> None:
    """BadRequestError and NotFoundError have message, code, param"""
    calls: list[tuple[Any, Any]] = [
        (openai.NotFoundError, lambda: c.models.retrieve("other")),
        (
            openai.BadRequestError,
            lambda: c.chat.completions.create(model=M, messages=HI, max_tokens=-2),
        ),
    ]
    for kind, request in calls:
        raised = None
        try:
            request()
        except openai.APIStatusError as error:
            raised = error
        assert isinstance(raised, kind)
        assert raised.body["message"]


@needs_only_model
def other_model(c: OpenAI) -> None:
    """the name of no model, which an only model answers"""
    found = c.chat.completions.create(model="other", messages=HI, max_tokens=4)
    assert found.model == M


@call
def stream_closed_early(c: OpenAI) -> None:
    """a stream that the client closes early; the server answers the next request"""
    stream = c.chat.completions.create(model=M, messages=HI, max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    assert c.models.list().data


@refuses
def image(c: OpenAI) -> None:
    """an image in a message"""
    messages: Any = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        }
    ]
    c.chat.completions.create(model=M, messages=messages)


@refuses
def audio(c: OpenAI) -> None:
    """audio answers"""
    c.chat.completions.create(
        model=M,
        messages=HI,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    )


@refuses
def stored(c: OpenAI) -> None:
    """responses.create with previous_response_id"""
    c.responses.create(model=M, input="Hello", previous_response_id="resp_1")


@call
def web(c: OpenAI) -> None:
    """responses.create with the tool web_search, which is left out with a note"""
    found: Any = c.responses.create(model=M, input="Hello", tools=[{"type": "web_search"}])
    assert "web_search" in found.notes[0]


@call
def files(c: OpenAI) -> None:
    """files.create, retrieve, list, content, delete, wait_for_processing"""
    file = c.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    assert c.files.wait_for_processing(file.id) == c.files.retrieve(file.id) == file
    assert file.id in [listed.id for listed in c.files.list(purpose="batch", limit=1)]
    assert c.files.content(file.id).read() == b"{}"
    assert c.files.delete(file.id).deleted


@call
def batches(c: OpenAI) -> None:
    """batches.create, retrieve, list, cancel"""
    url: Any = "/v1/chat/completions"
    body = {"model": M, "messages": HI, "max_tokens": 4}
    lines = [
        json.dumps({"custom_id": f"{number}", "method": "POST", "url": url, "body": body})
        for number in range(3)
    ]
    file = c.files.create(file=("a.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = c.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
        batch = c.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id and batch.request_counts
    assert batch.request_counts.completed == 3
    rows = [json.loads(row) for row in c.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in rows] == ["0", "1", "2"]
    for row in rows:
        assert ChatCompletion.model_validate(row["response"]["body"]).choices[0].message.content
    assert batch.id in [listed.id for listed in c.batches.list()]
    long = c.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    try:
        assert c.batches.cancel(long.id).status in ("cancelling", "cancelled")
    except ConflictError:  # it was faster
        assert c.batches.retrieve(long.id).status == "completed"


@refuses
def other_files(c: OpenAI) -> None:
    """files.create with the purpose assistants"""
    c.files.create(file=b"x", purpose="assistants")


run(OpenAI(base_url=URL, api_key="none", max_retries=0))
