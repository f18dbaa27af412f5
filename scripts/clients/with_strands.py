"""The documented calls of strands-agents through its models for OpenAI's, Anthropic's, ollama's and
llama.cpp's APIs, run against the server.
"""

import sys
from typing import Any, Literal

from pydantic import BaseModel, Field
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.litellm import LiteLLMModel
from strands.models.llamacpp import LlamaCppModel
from strands.models.ollama import OllamaModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

from scripts.clients.calls import MODEL, call_each, run

URL = sys.argv[1]
ROOT = URL.removesuffix("/v1")
KEY = {"api_key": "none", "max_retries": 0}
PARAMS: Any = {"max_tokens": 200, "temperature": 0}
MODELS: dict[str, Any] = {
    "OpenAIModel": lambda: OpenAIModel(
        client_args={"base_url": URL, **KEY}, model_id=MODEL, params=PARAMS
    ),
    "OpenAIResponsesModel": lambda: OpenAIResponsesModel(
        client_args={"base_url": URL, **KEY},
        model_id=MODEL,
        params={"max_output_tokens": 200, "temperature": 0},
    ),
    "LiteLLMModel": lambda: LiteLLMModel(
        client_args={"api_base": URL, "api_key": "none"}, model_id=f"openai/{MODEL}", params=PARAMS
    ),
    "LlamaCppModel": lambda: LlamaCppModel(base_url=ROOT, model_id=MODEL, params=PARAMS),
    "OllamaModel": lambda: OllamaModel(ROOT, model_id=MODEL, max_tokens=200, temperature=0),
    "AnthropicModel": lambda: AnthropicModel(
        client_args={"base_url": ROOT, **KEY}, model_id=MODEL, max_tokens=200
    ),
}


class PersonInfo(BaseModel):
    """Information about a person."""

    name: Literal["Ann", "Bob"] = Field(description="Name of the person")
    age: int | None = Field(None, description="Age in years")
    jobs: list[Literal["cook", "nurse"]] = Field(description="What the person does", max_length=2)


@tool
def word_count(text: str, limit: int = 0) -> int:
    """Count the words of a text.

    Args:
        text: The text.
        limit: The maximum number of words to count, 0 for all.
    """
    return len(text.split())


def make_agent(name: str, **more: Any) -> Agent:
    """Return an agent that prints nothing."""
    return Agent(model=MODELS[name](), callback_handler=None, **more)


def register_model(name: str) -> None:
    """Register the calls of one model class."""

    def text() -> None:
        result = make_agent(name, system_prompt="Be brief.")("Where is Rome?")
        assert str(result).strip() and result.stop_reason == "end_turn"

    async def stream() -> None:
        events = make_agent(name).stream_async("Where is Rome? Be brief.")
        assert "".join([event["data"] async for event in events if "data" in event])

    def tools() -> None:
        result = make_agent(name, tools=[word_count])("How many words are in: a b c")
        assert result.stop_reason in ("end_turn", "tool_use")

    def direct() -> None:
        agent = make_agent(name, tools=[word_count])
        agent.tool.word_count(text="a b c")
        assert str(agent("How many words were that? Be brief."))

    def structured() -> None:
        agent = make_agent(name)
        result = agent("Ann is a cook of 30 years.", structured_output_model=PersonInfo)
        assert isinstance(result.structured_output, PersonInfo)

    call_each(
        name,
        {
            text: "an agent with system_prompt",
            stream: "stream_async",
            tools: "tools, until the loop ends",
            direct: "a tool called directly, then a question about its result",
            structured: "structured_output_model",
        },
    )


for model_name in MODELS:
    register_model(model_name)

run()
