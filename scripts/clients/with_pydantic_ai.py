"""The documented calls of pydantic-ai through OpenAI's and Anthropic's APIs, run against the
server.
"""

import sys
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import (
    Agent,
    Embedder,
    ModelRetry,
    NativeOutput,
    PromptedOutput,
    RunContext,
    ToolOutput,
    UsageLimits,
)
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

from scripts.clients.calls import MODEL, call, call_each, run

URL = sys.argv[1]
OPENAI = OpenAIProvider(base_url=URL, api_key="none")
MODELS: dict[str, Any] = {
    "OpenAIChatModel": OpenAIChatModel(MODEL, provider=OPENAI),
    "OpenAIResponsesModel": OpenAIResponsesModel(MODEL, provider=OPENAI),
    "AnthropicModel": AnthropicModel(
        MODEL,
        provider=AnthropicProvider(base_url=URL.removesuffix("/v1"), api_key="none"),
        profile=ModelProfile(supports_json_schema_output=True),
    ),
}
OLLAMA = OpenAIChatModel(MODEL, provider=OllamaProvider(base_url=URL))
SETTINGS: Any = {"max_tokens": 200, "temperature": 0}
LIMITS = UsageLimits(request_limit=4)


class CityLocation(BaseModel):
    """Where a city is."""

    city: Literal["Rome", "Paris"]
    country: str = Field(max_length=20)
    inhabitants: int | None = None


class Refusal(BaseModel):
    """Why there is no answer."""

    reason: Literal["unknown", "unclear"]


@dataclass
class Deps:
    """What tools need."""

    name: str


def register_model(name: str) -> None:
    """Register the calls of one model class."""
    model = MODELS[name]

    def text() -> None:
        agent = Agent(model, instructions="Be concise.", model_settings=SETTINGS)
        result = agent.run_sync("Where is Rome?")
        assert result.output and result.usage.output_tokens > 0
        assert agent.run_sync("And Paris?", message_history=result.new_messages()).output

    async def stream() -> None:
        agent = Agent(model, model_settings=SETTINGS)
        async with agent.run_stream("Where is Rome?") as result:
            assert [part async for part in result.stream_text(delta=True)]

    def structured() -> None:
        outputs = {"tool": CityLocation, "native": NativeOutput(CityLocation)}
        for kind, output in outputs.items():
            agent = Agent(model, output_type=output, model_settings=SETTINGS, retries=2)
            result = agent.run_sync("Where is Rome?", usage_limits=LIMITS)
            assert isinstance(result.output, CityLocation), kind

    def tools() -> None:
        agent = Agent(model, deps_type=Deps, output_type=CityLocation, model_settings=SETTINGS)
        register_tools(agent)
        result = agent.run_sync("Where is Ann?", deps=Deps("Ann"), usage_limits=LIMITS)
        assert isinstance(result.output, CityLocation)

    async def stream_structured() -> None:
        agent = Agent(model, output_type=CityLocation, model_settings=SETTINGS)
        async with agent.run_stream("Where is Rome?", usage_limits=LIMITS) as result:
            parts = [part async for part in result.stream_output(debounce_by=None)]
        assert isinstance(parts[-1], CityLocation)

    call_each(
        name,
        {
            text: "Agent.run_sync with instructions and message_history",
            stream: "Agent.run_stream",
            structured: "output_type as a tool and as NativeOutput",
            tools: "tools with deps and output_type, until the loop ends",
            stream_structured: "run_stream with output_type",
        },
    )


def register_tools(agent: Any) -> None:
    """Add a tool with a context, one without, and one that asks the model to retry."""

    @agent.tool
    def player_name(context: RunContext[Deps]) -> str:
        """Get the player's name."""
        return context.deps.name

    @agent.tool_plain
    def find_city(name: str, exact: bool = True) -> str:
        """Get the city of a person.

        Args:
            name: Name of the person.
            exact: Whether the name must match.
        """
        if not name:
            raise ModelRetry("give a name")
        return "Rome"


for model_name in MODELS:
    register_model(model_name)


@call
def tool_calls() -> None:
    """tools without output_type: the loop ends"""
    agent = Agent(MODELS["OpenAIChatModel"], deps_type=Deps, model_settings=SETTINGS)
    register_tools(agent)
    assert agent.run_sync("Where is Ann?", deps=Deps("Ann"), usage_limits=LIMITS).output


@call
def several_outputs() -> None:
    """output_type as a list of types, and as ToolOutput"""
    model = MODELS["OpenAIChatModel"]
    agent: Any = Agent(model, output_type=[CityLocation, Refusal], model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Where is Rome?").output, CityLocation | Refusal)
    output: Any = ToolOutput(CityLocation, name="place", strict=True)
    agent = Agent(model, output_type=output, model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Where is Rome?").output, CityLocation)


@call
def prompted() -> None:
    """output_type as PromptedOutput"""
    output: Any = PromptedOutput(Refusal)
    agent = Agent(MODELS["OpenAIChatModel"], output_type=output, model_settings=SETTINGS, retries=3)
    assert isinstance(agent.run_sync("Write a refusal.").output, Refusal)


@call
async def iterate() -> None:
    """Agent.iter and run_stream_events"""
    agent = Agent(MODELS["OpenAIChatModel"], deps_type=Deps, model_settings=SETTINGS)
    register_tools(agent)
    async with agent.iter("Where is Ann?", deps=Deps("Ann"), usage_limits=LIMITS) as nodes:
        assert [node async for node in nodes]
    async with agent.run_stream_events("Hello", deps=Deps("Ann")) as events:
        assert [event async for event in events]


@call
def ollama() -> None:
    """OllamaProvider with output_type"""
    agent = Agent(OLLAMA, output_type=CityLocation, model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Where is Rome?").output, CityLocation)


@call
def embed() -> None:
    """Embedder.embed_documents_sync and embed_query_sync"""
    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=OPENAI))
    assert len(embedder.embed_documents_sync(["one", "two"]).embeddings) == 2
    assert len(embedder.embed_query_sync("one").embeddings) == 1


run()
