"""The documented calls of litellm through its providers for OpenAI's, Anthropic's and ollama's
APIs, run against the server.
"""

import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel, Field

from scripts.clients.calls import MODEL, call, call_each, run

URL = sys.argv[1]
ROOT = URL.removesuffix("/v1")
BASES = {
    f"openai/{MODEL}": URL,
    f"hosted_vllm/{MODEL}": URL,
    f"lm_studio/{MODEL}": URL,
    f"llamafile/{MODEL}": URL,
    f"anthropic/{MODEL}": ROOT,
    f"ollama_chat/{MODEL}": ROOT,
    f"ollama/{MODEL}": ROOT,
}
HELLO = [{"role": "user", "content": "Weather in Rome?"}]
USUAL: Any = {"api_key": "none", "num_retries": 0, "temperature": 0, "max_tokens": 40}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of a city"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city"],
            },
        },
    }
]


class Event(BaseModel):
    """An event in a calendar."""

    name: Literal["fair", "party"]
    people: list[Literal["Ann", "Bob"]] = Field(max_length=2)


def register_provider(model: str) -> None:
    """Register the calls of one provider."""
    args: Any = {**USUAL, "model": model, "api_base": BASES[model], "messages": HELLO}
    long = {**args, "max_tokens": 200}

    def completion() -> None:
        answer = litellm.completion(**args)
        assert answer.choices[0].message.content and answer.usage.completion_tokens > 0

    def stream() -> None:
        chunks = litellm.completion(**args, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def asynchronous() -> None:
        assert (await litellm.acompletion(**args)).choices[0].message.content
        chunks = await litellm.acompletion(**args, stream=True)
        assert [chunk async for chunk in chunks]

    def tools() -> None:
        answer = litellm.completion(**long, tools=TOOLS, tool_choice="required")
        calls = answer.choices[0].message.tool_calls
        if not model.startswith("ollama"):  # ollama's API has no tool_choice
            assert calls[0].function.name == "weather"
        results = [
            {"role": "tool", "tool_call_id": item.id, "name": "weather", "content": "sunny"}
            for item in calls or ()
        ]
        messages = [*HELLO, answer.choices[0].message, *results]
        if results:
            follow = litellm.completion(**{**args, "messages": messages}, tools=TOOLS)
            assert follow.choices[0].finish_reason

    def tools_streamed() -> None:
        chunks = list(litellm.completion(**long, tools=TOOLS, tool_choice="required", stream=True))
        whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
        if not model.startswith("ollama"):
            assert whole.choices[0].message.tool_calls[0].function.name == "weather"

    def structured() -> None:
        answer = litellm.completion(**long, response_format=Event)
        assert Event.model_validate_json(answer.choices[0].message.content)

    call_each(
        model,
        {
            completion: "completion",
            stream: "completion with stream=True",
            asynchronous: "acompletion, and with stream=True",
            tools: "completion with tools, and a tool's result",
            tools_streamed: "completion with tools and stream=True",
            structured: "completion with a pydantic response_format",
        },
    )


for name in BASES:
    register_provider(name)


@call
def embedding() -> None:
    """embedding: openai, hosted_vllm and ollama"""
    for model in (f"openai/{MODEL}", f"hosted_vllm/{MODEL}", f"ollama/{MODEL}"):
        answer = litellm.embedding(model, ["one", "two"], api_base=BASES[model], api_key="none")
        assert len(answer.data) == 2, model


@call
def text_completion() -> None:
    """text_completion: text-completion-openai"""
    args: Any = {"api_base": URL, "api_key": "none", "max_tokens": 8}
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once", **args)
    assert answer.choices[0].text


@call
def responses() -> None:
    """responses, and with stream=True"""
    args: Any = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "input": "Hello"}
    assert litellm.responses(**args, max_output_tokens=40).output
    assert list(litellm.responses(**args, max_output_tokens=40, stream=True))


@call
def json_mode() -> None:
    """completion with response_format json_object, stop, seed, n and logprobs"""
    args: Any = {**USUAL, "model": f"openai/{MODEL}", "api_base": URL, "messages": HELLO}
    assert litellm.completion(**args, response_format={"type": "json_object"}).choices
    answer = litellm.completion(**args, stop=["zzz"], seed=1, n=2, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == 2


@call
def router() -> None:
    """Router.completion"""
    params = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}
    deployment = {"model_name": MODEL, "litellm_params": params}
    answer = litellm.Router([deployment]).completion(MODEL, HELLO, max_tokens=20)
    assert answer.choices[0].message.content


run()
