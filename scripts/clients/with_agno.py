"""The documented calls of agno through its models for OpenAI's, Anthropic's and ollama's APIs, run
against the server.
"""

import sys
from typing import Any, Literal

from agno.agent import Agent
from agno.knowledge.embedder.ollama import OllamaEmbedder
from agno.knowledge.embedder.openai import OpenAIEmbedder
from agno.models.anthropic import Claude
from agno.models.llama_cpp import LlamaCpp
from agno.models.ollama import Ollama
from agno.models.openai import OpenAIChat, OpenAIResponses
from agno.models.openai.like import OpenAILike
from agno.team import Team
from agno.tools import tool
from openai import OpenAI
from pydantic import BaseModel, Field

from scripts.clients.calls import MODEL, call, call_each, run

URL = sys.argv[1]
ROOT = URL.removesuffix("/v1")
SERVER: Any = {"id": MODEL, "base_url": URL, "api_key": "none"}
MODELS: dict[str, Any] = {
    "OpenAIChat": lambda: OpenAIChat(**SERVER, max_tokens=200, temperature=0),
    "OpenAILike": lambda: OpenAILike(**SERVER, max_tokens=200, temperature=0),
    "OpenAIResponses": lambda: OpenAIResponses(**SERVER, max_output_tokens=200, store=False),
    "LlamaCpp": lambda: LlamaCpp(**SERVER, max_tokens=200, temperature=0),
    "Claude": lambda: Claude(
        id=MODEL, api_key="none", max_tokens=200, client_params={"base_url": ROOT}
    ),
    "Ollama": lambda: Ollama(id=MODEL, host=ROOT, options={"num_predict": 200, "temperature": 0}),
}


class MovieScript(BaseModel):
    """A script of a movie."""

    genre: Literal["drama", "comedy"] = Field(description="Genre of the movie")
    name: str = Field(max_length=20)
    lead: Literal["Ann", "Bob"] | None


def get_weather(city: str, celsius: bool = True) -> str:
    """Get the weather of a city.

    Args:
        city (str): The name of the city.
        celsius (bool): Whether the temperature is in degrees Celsius.
    """
    return f"sunny in {city}"


def register_model(name: str) -> None:
    """Register the calls of one model class."""
    make: Any = MODELS[name]

    def text() -> None:
        response = Agent(model=make(), instructions="Be brief.").run("Where is Rome?")
        assert response.status == "COMPLETED" and response.content, response.content
        assert response.metrics.output_tokens > 0

    def stream() -> None:
        events = list(Agent(model=make()).run("Where is Rome? Be brief.", stream=True))
        kinds = [event.event for event in events]
        assert "RunContent" in kinds and "RunError" not in kinds, events[-1]

    def tools() -> None:
        agent = Agent(model=make(), tools=[get_weather], tool_call_limit=2)
        response = agent.run("What is the weather in Rome?")
        assert response.status == "COMPLETED", response.content

    def tools_forced() -> None:
        # without an end after the first call, the model would have to call again and again
        last = tool(stop_after_tool_call=True)(get_weather)
        agent = Agent(model=make(), tools=[last], tool_choice="required")
        response = agent.run("What is the weather in Rome?")
        assert response.tools and response.tools[0].result, response.content

    def structured() -> None:
        response = Agent(model=make(), output_schema=MovieScript).run("A movie in Rome")
        assert isinstance(response.content, MovieScript), response.content

    async def asynchronous() -> None:
        agent = Agent(model=make(), tools=[get_weather], tool_call_limit=2)
        assert (await agent.arun("What is the weather in Rome?")).status == "COMPLETED"
        kinds = [event.event async for event in agent.arun("Hello", stream=True)]
        assert kinds and "RunError" not in kinds

    names = {
        text: "Agent.run",
        stream: "Agent.run with stream=True",
        tools: "Agent.run with tools",
        tools_forced: "Agent.run with tools and tool_choice",
        structured: "Agent.run with output_schema",
        asynchronous: "Agent.arun, and with stream=True",
    }
    if name in ("Claude", "Ollama"):  # these model classes have no tool_choice
        del names[tools_forced]
    call_each(name, names)


for model_name in MODELS:
    register_model(model_name)


@call
def json_mode() -> None:
    """Agent.run with output_schema and use_json_mode"""
    agent = Agent(model=MODELS["OpenAIChat"](), output_schema=MovieScript, use_json_mode=True)
    assert agent.run("A movie in Rome").status == "COMPLETED"


@call
def team() -> None:
    """Team.run with two agents"""
    members = [
        Agent(name=name, role="answers questions", model=MODELS["OpenAIChat"]())
        for name in ("Ann", "Bob")
    ]
    group = Team(members=members, model=MODELS["OpenAIChat"](), tool_call_limit=2)
    response = group.run("Where is Rome?")
    assert response.status == "COMPLETED", response.content


@call
def embed() -> None:
    """OpenAIEmbedder and OllamaEmbedder: get_embedding"""
    # agno asks for 1,536 numbers if it is not told how many the model has
    client = OpenAI(base_url=URL, api_key="none")
    numbers = len(client.embeddings.create(model=MODEL, input="one").data[0].embedding)
    for embedder in (
        OpenAIEmbedder(id=MODEL, base_url=URL, api_key="none", dimensions=numbers),
        OllamaEmbedder(id=MODEL, host=ROOT, dimensions=numbers),
    ):
        assert len(embedder.get_embedding("one")) == numbers


run()
