"""Documented calls of ollama's client against /api, except those that fetch and create models."""

import sys
from typing import Any

import ollama

from scripts.clients.calls import call, refuses, run

HELLO: Any = [{"role": "user", "content": "Weather in Paris?"}]
FEW: Any = {"num_predict": 24}


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: of which city
    """
    return f"{city}: sunny"


@call
def chat(c: ollama.Client) -> None:
    """chat, whole and streamed, with options"""
    whole = c.chat("local", messages=HELLO, options={**FEW, "temperature": 0})
    parts = list(c.chat("local", messages=HELLO, options={**FEW, "temperature": 0}, stream=True))
    assert whole.message.content and whole.eval_count and parts[-1].done and len(parts) > 2


@call
async def chat_async(c: ollama.Client) -> None:
    """AsyncClient: chat, streamed"""
    made = ollama.AsyncClient(host=sys.argv[1].removesuffix("/v1"))
    parts = [
        part async for part in await made.chat("local", messages=HELLO, options=FEW, stream=True)
    ]
    assert parts[-1].done_reason in ("stop", "length")


@call
def generate(c: ollama.Client) -> None:
    """generate: system, raw, streamed"""
    assert c.generate("local", "Hello", system="Be brief.", options=FEW).response
    assert c.generate("local", "Once", raw=True, options=FEW).eval_count
    assert list(c.generate("local", "Hello", options=FEW, stream=True))[-1].done


@call
def form(c: ollama.Client) -> None:
    """format: json, and a schema"""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert c.chat("local", messages=HELLO, format=schema).message.content == '{"a": "x"}'
    assert (
        c.chat("local", messages=HELLO, format="json", options=FEW).message.content or ""
    ).startswith("{")


@call
def tools(c: ollama.Client) -> None:
    """tools: a Python function, and a result"""
    c.chat("local", messages=HELLO, tools=[get_weather], options=FEW)
    called: Any = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
    }
    more = [*HELLO, called, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    assert c.chat("local", messages=more, tools=[get_weather], options=FEW).eval_count


@call
def models(c: ollama.Client) -> None:
    """list, ps, show"""
    assert (
        [one.model for one in c.list().models] == [one.model for one in c.ps().models] == ["local"]
    )
    assert "completion" in c.show("local").capabilities


@call
def vectors(c: ollama.Client) -> None:
    """embed, embeddings"""
    one, two = c.embed("local", ["a", "b"]).embeddings
    assert len(one) == len(two) == len(c.embeddings("local", "a").embedding)


@refuses
def other(c: ollama.Client) -> None:
    """an unknown model"""
    c.chat("other", messages=HELLO)


@refuses
def pull(c: ollama.Client) -> None:
    """pull (use llmcli pull)"""
    c.pull("other")


run(ollama.Client(host=sys.argv[1].removesuffix("/v1")))
