"""The documented calls of dspy: modules, adapters, agents, streaming and embeddings, run against
the server.
"""

import sys
from typing import Any, Literal

import dspy
from pydantic import BaseModel

from scripts.clients.calls import MODEL, call, run

URL = sys.argv[1]
SERVER: Any = {"api_base": URL, "api_key": "none", "cache": False, "num_retries": 0}
LM = dspy.LM(f"openai/{MODEL}", max_tokens=300, temperature=0, **SERVER)
dspy.configure(lm=LM)


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Bob"]
    age: int | None


class Extract(dspy.Signature):
    """Extract the people from a text."""

    text: str = dspy.InputField()
    title: str = dspy.OutputField()
    people: list[Person] = dspy.OutputField(desc="all people")


class Classify(dspy.Signature):
    """Classify the sentiment of a sentence."""

    sentence: str = dspy.InputField()
    sentiment: Literal["positive", "negative"] = dspy.OutputField()


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


@call
def text() -> None:
    """dspy.LM with a prompt and with messages"""
    assert LM("Say hello.")[0]
    assert LM(messages=[{"role": "user", "content": "Say hello."}])[0]


@call
def predict() -> None:
    """Predict with a signature as text"""
    assert dspy.Predict("question -> answer")(question="Where is Rome?").answer


@call
def chain_of_thought() -> None:
    """ChainOfThought"""
    result = dspy.ChainOfThought("question -> answer: str")(question="Where is Rome?")
    assert result.answer and result.reasoning


@call
def classify() -> None:
    """Predict with a Literal as output"""
    sentence = "This book was fun to read."
    assert dspy.Predict(Classify)(sentence=sentence).sentiment in ("positive", "negative")


@call
def json_adapter() -> None:
    """JSONAdapter: Predict with pydantic models as output"""
    with dspy.context(adapter=dspy.JSONAdapter()):
        result = dspy.Predict(Extract)(text="Ann is 25. Bob is older.")
    assert all(isinstance(person, Person) for person in result.people)


@call
def xml_adapter() -> None:
    """XMLAdapter: Predict"""
    with dspy.context(adapter=dspy.XMLAdapter()):
        assert dspy.Predict("question -> answer")(question="Where is Rome?").answer


@call
def native_calls() -> None:
    """native function calls: Predict with dspy.Tool and dspy.ToolCalls"""

    class Call(dspy.Signature):
        """Call tools to answer."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        outputs: dspy.ToolCalls = dspy.OutputField()

    with dspy.context(adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        result = dspy.Predict(Call)(question="Weather in Rome?", tools=[dspy.Tool(get_weather)])
    assert isinstance(result, dspy.Prediction)


@call
def react() -> None:
    """ReAct with a tool, until it ends"""
    agent = dspy.ReAct("question -> answer", tools=[get_weather], max_iters=2)
    with dspy.context(adapter=dspy.JSONAdapter()):
        assert agent(question="What is the weather in Rome?").answer


@call
async def asynchronous() -> None:
    """acall, and asyncify"""
    assert (await dspy.Predict("question -> answer").acall(question="Where is Rome?")).answer
    program = dspy.asyncify(dspy.Predict("question -> answer"))
    assert (await program(question="Where is Paris?")).answer


@call
async def stream() -> None:
    """streamify with a StreamListener"""
    program = dspy.streamify(
        dspy.Predict("question -> answer"),
        stream_listeners=[dspy.streaming.StreamListener(signature_field_name="answer")],
    )
    items = [item async for item in program(question="Where is Rome?")]
    assert isinstance(items[-1], dspy.Prediction)


@call
def responses() -> None:
    """dspy.LM with model_type responses"""
    model = dspy.LM(
        f"openai/{MODEL}", model_type="responses", max_tokens=200, temperature=0, **SERVER
    )
    with dspy.context(lm=model):
        assert dspy.Predict("question -> answer")(question="Where is Rome?").answer


@call
def completion() -> None:
    """dspy.LM with model_type text"""
    model = dspy.LM(f"openai/{MODEL}", model_type="text", max_tokens=20, temperature=0, **SERVER)
    assert model("Once upon a time")[0]


@call
def embed() -> None:
    """Embedder, and retrieval with Embeddings"""
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=URL, api_key="none", caching=False)
    assert embedder(["one", "two"]).shape[0] == 2
    search = dspy.retrievers.Embeddings(corpus=["Rome", "Paris"], embedder=embedder, k=1)
    assert len(search("Rome").passages) == 1


run()
