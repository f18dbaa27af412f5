"""The documented calls of the Python client ollama, run against the server's /api. Calls that
download or create models are left out.
"""

import json
import sys
from typing import Any

import ollama

from scripts.clients.calls import MODEL, OTHER_MODELS, call, needs_only_model, refuses, run

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
    """chat with options, complete and streamed"""
    whole = c.chat(MODEL, messages=HELLO, options={**FEW, "temperature": 0})
    parts = list(c.chat(MODEL, messages=HELLO, options={**FEW, "temperature": 0}, stream=True))
    assert whole.message.content and whole.eval_count and parts[-1].done and len(parts) > 2


@call
async def chat_async(c: ollama.Client) -> None:
    """AsyncClient: chat(stream=True)"""
    client = ollama.AsyncClient(host=sys.argv[1].removesuffix("/v1"))
    parts = [
        part async for part in await client.chat(MODEL, messages=HELLO, options=FEW, stream=True)
    ]
    assert parts[-1].done_reason in ("stop", "length")


@call
def generate(c: ollama.Client) -> None:
    """generate with system, with raw, and streamed"""
    assert c.generate(MODEL, "Hello", system="Be brief.", options=FEW).response
    assert c.generate(MODEL, "Once", raw=True, options=FEW).eval_count
    assert list(c.generate(MODEL, "Hello", options=FEW, stream=True))[-1].done


@call
def response_format(c: ollama.Client) -> None:
    """chat with format="json", and with a JSON schema as format"""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    found = c.chat(MODEL, messages=HELLO, format=schema).message.content
    assert json.loads(found or "") == {"a": "x"}
    assert (
        c.chat(MODEL, messages=HELLO, format="json", options=FEW).message.content or ""
    ).startswith("{")


@call
def tools(c: ollama.Client) -> None:
    """chat with a Python function as a tool, and with a tool result"""
    c.chat(MODEL, messages=HELLO, tools=[get_weather], options=FEW)
    called: Any = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
    }
    messages = [*HELLO, called, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    assert c.chat(MODEL, messages=messages, tools=[get_weather], options=FEW).eval_count


@call
def models(c: ollama.Client) -> None:
    """list, ps, show"""
    assert {model.model for model in c.list().models} == {MODEL, *OTHER_MODELS}
    assert MODEL in [model.model for model in c.ps().models]
    assert "completion" in c.show(MODEL).capabilities


@call
def vectors(c: ollama.Client) -> None:
    """embed, embeddings"""
    first, second = c.embed(MODEL, ["a", "b"]).embeddings
    assert len(first) == len(second) == len(c.embeddings(MODEL, "a").embedding)


@needs_only_model
def other_model(c: ollama.Client) -> None:
    """the name of no model, which an only model answers"""
    assert c.chat("other", messages=HELLO, options=FEW).model == MODEL


@refuses
def pull(c: ollama.Client) -> None:
    """pull, which the server refuses in favor of `llmcli pull`"""
    c.pull("other")


run(ollama.Client(host=sys.argv[1].removesuffix("/v1")))
