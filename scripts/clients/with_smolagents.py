"""The documented calls of smolagents: models, ToolCallingAgent and CodeAgent, run against the
server.
"""

import sys
from typing import Any, ClassVar

from smolagents import CodeAgent, LiteLLMModel, OpenAIModel, Tool, ToolCallingAgent, tool

from scripts.clients.calls import MODEL, call, run

URL = sys.argv[1]
KEYS: Any = {"api_key": "none", "temperature": 0}
HELLO: Any = [{"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]}]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def openai_model(max_tokens: int = 60) -> OpenAIModel:
    """Return the model by OpenAI's API, with short answers."""
    return OpenAIModel(MODEL, api_base=URL, max_tokens=max_tokens, **KEYS)


@tool
def get_weather(city: str, celsius: bool | None = False) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
        celsius: Whether the temperature is in degrees Celsius.
    """
    return f"sunny in {city}"


class Counter(Tool):
    """A tool as a class, with an optional input of any type."""

    name = "count_letters"
    description = "Counts the letters of a word."
    inputs: ClassVar[dict[str, Any]] = {
        "word": {"type": "string", "description": "the word"},
        "options": {"type": "any", "description": "further options", "nullable": True},
    }
    output_type = "integer"

    def forward(self, word: str, options: Any = None) -> int:
        """Return the number of letters."""
        return len(word)


@call
def generate() -> None:
    """OpenAIModel.generate with stop_sequences, and its token usage"""
    message = openai_model().generate(HELLO, stop_sequences=["zzz"])
    assert message.content and message.token_usage.output_tokens > 0


@call
def generate_stream() -> None:
    """OpenAIModel.generate_stream"""
    assert "".join(delta.content or "" for delta in openai_model().generate_stream(HELLO))


@call
def generate_schema() -> None:
    """OpenAIModel.generate with response_format"""
    assert '"city"' in openai_model().generate(HELLO, response_format=SCHEMA).content


@call
def generate_calls() -> None:
    """OpenAIModel.generate with tools_to_call_from"""
    message = openai_model(200).generate(HELLO, tools_to_call_from=[get_weather, Counter()])
    assert message.tool_calls[0].function.name in ("get_weather", "count_letters")


@call
def litellm() -> None:
    """LiteLLMModel.generate"""
    model = LiteLLMModel(f"openai/{MODEL}", api_base=URL, max_tokens=40, **KEYS)
    assert model.generate(HELLO).content


@call
def calling_agent() -> None:
    """ToolCallingAgent.run with tools"""
    agent = ToolCallingAgent([get_weather, Counter()], openai_model(150), max_steps=2)
    agent.run("What is the weather in Rome?")
    assert any(getattr(step, "tool_calls", None) for step in agent.memory.steps)


@call
def calling_agent_stream() -> None:
    """ToolCallingAgent.run with stream=True and stream_outputs"""
    agent = ToolCallingAgent([get_weather], openai_model(150), max_steps=2, stream_outputs=True)
    assert list(agent.run("What is the weather in Rome?", stream=True))


@call
def code_agent() -> None:
    """CodeAgent.run with a tool"""
    agent = CodeAgent([get_weather], openai_model(150), max_steps=2)
    agent.run("What is the weather in Rome?")
    assert len(agent.memory.steps) > 1


@call
def code_agent_structured() -> None:
    """CodeAgent.run with use_structured_outputs_internally"""
    agent = CodeAgent(
        [get_weather], openai_model(300), max_steps=1, use_structured_outputs_internally=True
    )
    agent.run("What is the weather in Rome?")
    assert len(agent.memory.steps) > 1


run()
