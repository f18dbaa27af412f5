"""The documented calls of haystack-ai: chat generators, tools, agents, pipelines and embedders, run
against the server.
"""

import sys
from typing import Annotated, Any, Literal

from haystack import Document, Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

from scripts.clients.calls import MODEL, call, call_each, run

SERVER: Any = {
    "model": MODEL,
    "api_base_url": sys.argv[1],
    "api_key": Secret.from_token("none"),
    "max_retries": 0,
    "timeout": 300,
}
GENERATORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "OpenAIChatGenerator": (OpenAIChatGenerator, {"max_completion_tokens": 200, "temperature": 0}),
    "OpenAIResponsesChatGenerator": (OpenAIResponsesChatGenerator, {"max_output_tokens": 200}),
}
HELLO = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("Weather in Rome?")]


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Paris"]
    country: Literal["Italy", "France"]


@tool
def weather(
    city: Annotated[str, "The name of the city"],
    unit: Annotated[Literal["celsius", "fahrenheit"], "The unit"] = "celsius",
) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def register_generator(name: str) -> None:
    """Register the calls of one chat generator."""
    kind, settings = GENERATORS[name]

    def make(**more: Any) -> Any:
        """Return a generator with further settings of the model."""
        return kind(**SERVER, generation_kwargs={**settings, **more})

    def run_messages() -> None:
        (reply,) = make().run(HELLO)["replies"]
        assert reply.text and reply.meta["usage"]

    def stream() -> None:
        chunks: list[Any] = []
        (reply,) = make().run(HELLO, streaming_callback=chunks.append)["replies"]
        assert reply.text and len(chunks) > 1

    async def asynchronous() -> None:
        assert (await make().run_async(HELLO))["replies"][0].text

    def tools() -> None:
        (reply,) = make(tool_choice="required").run(HELLO, tools=[weather])["replies"]
        made = reply.tool_calls[0]
        assert made.tool_name == "weather"
        result = ChatMessage.from_tool("sunny", origin=made)
        assert make().run([*HELLO, reply, result], tools=[weather])["replies"]

    def tools_strict() -> None:
        generator = make(tool_choice="required")
        (reply,) = generator.run(HELLO, tools=[weather], tools_strict=True)["replies"]
        assert reply.tool_calls[0].arguments["city"]

    def structured() -> None:
        key = "response_format" if kind is OpenAIChatGenerator else "text_format"
        (reply,) = make(**{key: City}).run([ChatMessage.from_user("Where is Rome?")])["replies"]
        assert City.model_validate_json(reply.text)

    def agent() -> None:
        worker = Agent(
            chat_generator=make(),
            tools=[weather],
            system_prompt="Use the tool.",
            max_agent_steps=3,
        )
        result = worker.run(messages=[ChatMessage.from_user("What is the weather in Rome?")])
        assert result["messages"]

    def agent_forced() -> None:
        worker = Agent(
            chat_generator=make(tool_choice="required"),
            tools=[weather],
            exit_conditions=["weather"],
            max_agent_steps=3,
        )
        result = worker.run(messages=[ChatMessage.from_user("What is the weather in Rome?")])
        assert result["last_message"].tool_call_results[0].result.startswith("sunny")

    call_each(
        name,
        {
            run_messages: "run",
            stream: "run with streaming_callback",
            asynchronous: "run_async",
            tools: "tools, and a tool's result",
            tools_strict: "tools with tools_strict",
            structured: "a pydantic model as the answer's format",
            agent: "Agent with a tool, until it ends",
            agent_forced: "Agent with exit_conditions",
        },
    )


for generator_name in GENERATORS:
    register_generator(generator_name)


@call
def pipeline() -> None:
    """a pipeline of ChatPromptBuilder and OpenAIChatGenerator"""
    template = [ChatMessage.from_user("What is the capital of {{country}}?")]
    line = Pipeline()
    line.add_component("prompt", ChatPromptBuilder(template=template))
    line.add_component(
        "model", OpenAIChatGenerator(**SERVER, generation_kwargs={"max_completion_tokens": 40})
    )
    line.connect("prompt.prompt", "model.messages")
    assert line.run({"prompt": {"country": "Italy"}})["model"]["replies"][0].text


@call
def retrieval() -> None:
    """embedders, a document store, a retriever and an answer"""
    store = InMemoryDocumentStore()
    documents = [Document(content="Rome is in Italy"), Document(content="Paris is in France")]
    store.write_documents(OpenAIDocumentEmbedder(**SERVER).run(documents)["documents"])
    template = [
        ChatMessage.from_user(
            "{% for document in documents %}{{ document.content }}\n{% endfor %}{{ question }}"
        )
    ]
    line = Pipeline()
    line.add_component("embedder", OpenAITextEmbedder(**SERVER))
    line.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    line.add_component("prompt", ChatPromptBuilder(template=template))
    line.add_component(
        "model", OpenAIChatGenerator(**SERVER, generation_kwargs={"max_completion_tokens": 40})
    )
    line.connect("embedder.embedding", "retriever.query_embedding")
    line.connect("retriever", "prompt.documents")
    line.connect("prompt", "model")
    question = "Where is Rome?"
    result = line.run({"embedder": {"text": question}, "prompt": {"question": question}})
    assert result["model"]["replies"][0].text


run()
