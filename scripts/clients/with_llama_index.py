"""The documented calls of llama-index: models, structured output, agents, retrieval and embeddings,
run against the server.
"""

import sys
from typing import Any, Literal

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from scripts.clients.calls import MODEL, OTHER_MODELS, call, call_each, needs_only_model, run

URL = sys.argv[1]
ROOT = URL.removesuffix("/v1")
KEYS: Any = {
    "api_key": "none",
    "max_retries": 0,
    "temperature": 0,
    "max_tokens": 200,
    "timeout": 300,
}
LIKE = OpenAILike(
    MODEL,
    api_base=URL,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=8192,
    **KEYS,
)
MODELS: dict[str, Any] = {
    "OpenAILike": LIKE,
    "Ollama": Ollama(
        MODEL,
        base_url=ROOT,
        request_timeout=300,
        temperature=0,
        context_window=8192,
        additional_kwargs={"num_predict": 200},
    ),
    "Anthropic": Anthropic("claude-sonnet-4-0", base_url=ROOT, **KEYS),
}
EMBEDDER = OpenAILikeEmbedding(MODEL, api_base=URL, api_key="none")
HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage("Where is Rome?")]


class Restaurant(BaseModel):
    """A restaurant."""

    name: str = Field(max_length=20)
    city: Literal["Rome", "Paris"]
    cuisine: list[Literal["pizza", "pasta"]] = Field(max_length=2)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def register_model(name: str) -> None:
    """Register the calls of one model class."""
    model = MODELS[name]
    tool = FunctionTool.from_defaults(get_weather)

    def complete() -> None:
        assert model.complete("Rome is the capital of").text
        assert "".join(part.delta or "" for part in model.stream_complete("Rome is"))

    def chat() -> None:
        assert model.chat(HELLO).message.content
        assert "".join(part.delta or "" for part in model.stream_chat(HELLO))

    async def asynchronous() -> None:
        assert (await model.achat(HELLO)).message.content
        parts = await model.astream_chat(HELLO)
        assert [part async for part in parts]

    def tools() -> None:
        response = model.chat_with_tools([tool], "Weather in Rome?", tool_required=True)
        selected = model.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        if name != "Ollama":  # ollama's API has no tool_choice
            assert selected[0].tool_name == "get_weather"

    def structured() -> None:
        structured_model = model.as_structured_llm(Restaurant)
        assert isinstance(structured_model.complete("A restaurant in Rome").raw, Restaurant)

    def structured_predict() -> None:
        prompt = PromptTemplate("A restaurant in {city}")
        assert isinstance(model.structured_predict(Restaurant, prompt, city="Rome"), Restaurant)

    async def agent() -> None:
        worker = FunctionAgent(tools=[get_weather], llm=model, system_prompt="Be brief.")
        context = Context(worker)
        assert await worker.run("What is the weather in Rome?", ctx=context, max_iterations=4)
        assert await worker.run("And in Paris?", ctx=context, max_iterations=4)

    call_each(
        name,
        {
            complete: "complete and stream_complete",
            chat: "chat and stream_chat",
            asynchronous: "achat and astream_chat",
            tools: "chat_with_tools",
            structured: "as_structured_llm",
            structured_predict: "structured_predict",
            agent: "FunctionAgent with memory, until it ends",
        },
    )


# llama-index's class knows Anthropic's names only. A server with several models has none of them.
for model_name in MODELS:
    if not (OTHER_MODELS and model_name == "Anthropic"):
        register_model(model_name)


@needs_only_model
def anthropic() -> None:
    """Anthropic: complete with a name of Anthropic's"""
    MODELS["Anthropic"].complete("Rome is the capital of")


@call
async def agent_stream() -> None:
    """FunctionAgent: stream_events"""
    worker = FunctionAgent(tools=[get_weather], llm=LIKE)
    handler = worker.run("What is the weather in Rome?", max_iterations=4)
    assert [event async for event in handler.stream_events()]
    assert await handler


@call
async def react_agent() -> None:
    """ReActAgent with a tool"""
    worker = ReActAgent(tools=[get_weather], llm=LIKE)
    assert await worker.run("Say hello.", max_iterations=4, early_stopping_method="generate")


@call
def stream_structured() -> None:
    """stream_structured_predict"""
    parts = list(LIKE.stream_structured_predict(Restaurant, PromptTemplate("A restaurant")))
    assert parts


@call
def text_completion() -> None:
    """OpenAILike with is_chat_model=False"""
    model = OpenAILike(MODEL, api_base=URL, is_chat_model=False, context_window=8192, **KEYS)
    assert model.complete("Once upon a time", max_tokens=8).text


@call
def index() -> None:
    """VectorStoreIndex: as_query_engine and as_chat_engine"""
    Settings.llm, Settings.embed_model = LIKE, EMBEDDER
    documents = [Document(text="Rome is in Italy"), Document(text="Paris is in France")]
    store = VectorStoreIndex.from_documents(documents)
    assert store.as_query_engine(similarity_top_k=1).query("Where is Rome?").response
    assert store.as_chat_engine(chat_mode="context").chat("Where is Rome?").response
    engine = store.as_query_engine(output_cls=Restaurant)
    assert engine.query("A restaurant in Rome").response


@call
async def embed() -> None:
    """OpenAILikeEmbedding: texts and queries"""
    assert len(EMBEDDER.get_text_embedding_batch(["one", "two"])) == 2
    assert len(await EMBEDDER.aget_query_embedding("one")) > 8


run()
