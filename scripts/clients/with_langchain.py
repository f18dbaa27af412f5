"""The documented calls of langchain-openai's ChatOpenAI, OpenAI and OpenAIEmbeddings, run against
the server.
"""

import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field

from scripts.clients.calls import MODEL, call, needs_only_model, refuses, run

URL = sys.argv[1]
MESSAGES = [("system", "You translate English to French."), ("human", "I love programming.")]


class Answer(BaseModel):
    """An answer and how sure it is."""

    good: bool = Field(description="whether it is")
    number: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


@call
def invoke(m: ChatOpenAI) -> None:
    """ChatOpenAI.invoke with a list of messages"""
    answer = m.invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.usage_metadata["total_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


@call
def objects(m: ChatOpenAI) -> None:
    """ChatOpenAI.invoke with message objects, and with plain text"""
    assert m.invoke(
        [SystemMessage("Be brief"), HumanMessage("Hi"), AIMessage("Hello"), HumanMessage("Bye")]
    ).content
    assert m.invoke("Hello").content


@call
def stream(m: ChatOpenAI) -> None:
    """ChatOpenAI.stream with token usage"""
    full: Any = None
    for part in m.stream(MESSAGES, stream_usage=True):
        full = part if full is None else full + part
    assert full.content
    assert full.usage_metadata["output_tokens"] > 0


@call
async def asynchronous(m: ChatOpenAI) -> None:
    """ainvoke, astream, abatch"""
    assert (await m.ainvoke(MESSAGES)).content
    assert [part async for part in m.astream(MESSAGES)]
    assert len(await m.abatch([MESSAGES, "Hello"])) == 2


@call
async def events(m: ChatOpenAI) -> None:
    """astream_events"""
    assert "on_chat_model_stream" in {
        event["event"] async for event in m.astream_events("Hello", version="v2")
    }


@call
def batch(m: ChatOpenAI) -> None:
    """batch and batch_as_completed"""
    assert len(m.batch(["One", "Two", "Three"])) == 3
    assert len(list(m.batch_as_completed(["One", "Two"]))) == 2


@call
def chain(m: ChatOpenAI) -> None:
    """a chain of prompt template, model and output parser: invoke and stream"""
    pipeline = (
        ChatPromptTemplate.from_messages([("system", "To {language}"), ("human", "{text}")])
        | m
        | StrOutputParser()
    )
    assert pipeline.invoke({"language": "German", "text": "I love programming."})
    assert list(pipeline.stream({"language": "German", "text": "Hi"}))


@call
def tools(m: ChatOpenAI) -> None:
    """bind_tools with tool_choice and strict, and a tool result sent back"""
    bound = m.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    answer = bound.invoke("Weather in Rome?", max_tokens=200)
    assert answer.tool_calls[0]["name"] == "get_weather"
    result = ToolMessage(
        get_weather.invoke(answer.tool_calls[0]["args"]), tool_call_id=answer.tool_calls[0]["id"]
    )
    assert (
        m.bind_tools([get_weather]).invoke([HumanMessage("Weather?"), answer, result]) is not None
    )
    assert (
        m.bind_tools([Answer], strict=True, tool_choice="any")
        .invoke("Is it?", max_tokens=200)
        .tool_calls
    )


@call
def tools_streamed(m: ChatOpenAI) -> None:
    """bind_tools with stream"""
    full: Any = None
    for part in m.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).stream(
        "Rome?", max_tokens=200
    ):
        full = part if full is None else full + part
    assert full.tool_calls[0]["name"] == "get_weather"


@call
def structured(m: ChatOpenAI) -> None:
    """with_structured_output: json_schema, function_calling, include_raw"""
    for method in ("json_schema", "function_calling"):
        bound = m.with_structured_output(Answer, method=method)
        assert isinstance(bound.invoke("Is it good?", max_tokens=200), Answer), method
    both = m.with_structured_output(Answer, include_raw=True).invoke("Is it good?", max_tokens=200)
    assert isinstance(both["parsed"], Answer)
    assert both["raw"].content
    schema = {
        "title": "Joke",
        "type": "object",
        "properties": {"funny": {"type": "boolean"}},
        "required": ["funny"],
    }
    assert set(m.with_structured_output(schema).invoke("A joke?", max_tokens=200)) >= {"funny"}


@call
def json_mode(m: ChatOpenAI) -> None:
    """bind(response_format={"type": "json_object"})"""
    try:
        text = (
            m.bind(response_format={"type": "json_object"})
            .invoke("Answer in JSON", max_tokens=400)
            .content
        )
    except LengthFinishReasonError as error:
        # A small model may not finish the document, for which langchain raises this error.
        text = error.completion.choices[0].message.content
    assert text.startswith("{")


@call
def logprobs(m: ChatOpenAI) -> None:
    """bind(logprobs=True)"""
    answer = m.bind(logprobs=True, top_logprobs=2).invoke("Hello", max_tokens=4)
    assert len(answer.response_metadata["logprobs"]["content"]) <= 4


@call
def generate(m: ChatOpenAI) -> None:
    """generate with n, stop, seed, temperature"""
    model = ChatOpenAI(
        model=MODEL,
        base_url=URL,
        api_key="x",
        n=2,
        seed=1,
        temperature=0.5,
        max_tokens=8,
        max_retries=0,
    )
    result = model.generate([[HumanMessage("Hi")]], stop=["zzz"])
    assert len(result.generations[0]) == 2
    assert result.llm_output["token_usage"]["completion_tokens"] > 0


@call
def responses(m: ChatOpenAI) -> None:
    """ChatOpenAI(use_responses_api=True): invoke, stream, tools, structured output"""
    r = ChatOpenAI(
        model=MODEL,
        base_url=URL,
        api_key="x",
        use_responses_api=True,
        max_tokens=64,
        max_retries=0,
    )
    assert r.invoke("Hello").text
    full: Any = None
    for part in r.stream("Hello"):
        full = part if full is None else full + part
    assert full.text
    called = r.bind_tools(
        [get_weather], tool_choice="get_weather", parallel_tool_calls=False
    ).invoke("Rome?")
    assert called.tool_calls[0]["name"] == "get_weather"
    assert isinstance(r.with_structured_output(Answer).invoke("Is it good?"), Answer)


@call
def completion(m: ChatOpenAI) -> None:
    """OpenAI (completions): invoke, stream, batch"""
    c = OpenAI(model=MODEL, base_url=URL, api_key="x", max_tokens=8, max_retries=0)
    assert c.invoke("Once upon a time")
    assert list(c.stream("Once upon"))
    assert len(c.batch(["One", "Two"])) == 2


@call
def embeddings(m: ChatOpenAI) -> None:
    """OpenAIEmbeddings: embed_query, embed_documents (texts and token ids)"""
    e = OpenAIEmbeddings(
        model=MODEL, base_url=URL, api_key="x", check_embedding_ctx_length=False, max_retries=0
    )
    first, second = e.embed_documents(["one", "two"])
    assert len(first) == len(second) == len(e.embed_query("one"))


@call
async def embeddings_async(m: ChatOpenAI) -> None:
    """OpenAIEmbeddings: aembed_query"""
    e = OpenAIEmbeddings(
        model=MODEL, base_url=URL, api_key="x", check_embedding_ctx_length=False, max_retries=0
    )
    assert await e.aembed_query("one")


@refuses
def image(m: ChatOpenAI) -> None:
    """an image in a message"""
    parts: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    m.invoke([HumanMessage(parts)])


@needs_only_model
def other_model(m: ChatOpenAI) -> None:
    """the name of no model, which an only model answers"""
    ChatOpenAI(model="other", base_url=URL, api_key="x", max_retries=0).invoke("Hello")


run(ChatOpenAI(model=MODEL, base_url=URL, api_key="x", max_tokens=24, max_retries=0))
