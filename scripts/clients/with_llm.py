"""Documented commands and Python calls of simonw's llm with an OpenAI endpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

URL = sys.argv[1]
HOME = Path(os.environ["LLM_USER_PATH"])
HOME.mkdir(parents=True, exist_ok=True)
(HOME / "extra-openai-models.yaml").write_text(f"""
- model_id: local
  model_name: local
  api_base: {URL}
  supports_schema: true
  supports_tools: true
- model_id: local-completion
  model_name: local
  api_base: {URL}
  completion: true
""")

import llm  # noqa: E402 (it reads the file when it is imported)

from scripts.clients.calls import call, run  # noqa: E402

MOST = ("-o", "max_tokens", "24")


def cli(*words: str, given: str | None = None) -> str:
    """Run one command line of llm."""
    done = subprocess.run(
        [sys.executable, "-m", "llm", *words],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout


@call
def prompt() -> None:
    """llm -m MODEL PROMPT"""
    assert cli("-m", "local", "Ten names for a cat", *MOST).strip()


@call
def plain() -> None:
    """llm --no-stream -s SYSTEM, from a pipe"""
    assert cli("-m", "local", "--no-stream", "-s", "Translate", *MOST, given="Hello").strip()


@call
def options() -> None:
    """llm -o temperature, top_p, seed, stop, presence_penalty, logit_bias, json_object"""
    more = [
        "-o",
        "temperature",
        "0.5",
        "-o",
        "top_p",
        "0.9",
        "-o",
        "seed",
        "3",
        "-o",
        "presence_penalty",
        "0.1",
    ]
    assert cli(
        "-m", "local", "Hello", *MOST, *more, "-o", "logit_bias", '{"5": -10}', "-o", "stop", "zzz"
    ).strip()
    assert cli("-m", "local", "JSON", *MOST, "-o", "json_object", "1").strip().startswith("{")


@call
def go_on() -> None:
    """llm -c (conversation), llm logs, usage"""
    cli("-m", "local", "My name is Ann", *MOST)
    assert cli("-c", "What is my name?", *MOST).strip()
    log = json.loads(cli("logs", "-n", "1", "--json"))
    assert log[0]["input_tokens"] > 0
    assert log[0]["output_tokens"] > 0


@call
def chat() -> None:
    """llm chat"""
    assert "Chatting with local" in cli("chat", "-m", "local", *MOST, given="Hello\nexit\n")


@call
def schema() -> None:
    """llm schemas dsl, llm --schema"""
    closed = json.loads(cli("schemas", "dsl", "age int, good bool")) | {
        "additionalProperties": False
    }  # otherwise a small model may not end
    found = json.loads(
        cli("-m", "local", "--schema", json.dumps(closed), "A dog", "-o", "max_tokens", "400")
    )
    assert set(found) == {"age", "good"}


@call
def tools() -> None:
    """llm --functions (a tool by code), tools debug"""
    code = "def multiply(x: int, y: int) -> int:\n    'Multiply two numbers'\n    return x * y\n"
    cli("-m", "local", "--functions", code, "--td", "What is 6 times 7?", *MOST)


@call
def completion() -> None:
    """a completion model"""
    assert cli("-m", "local-completion", "Once upon a time", *MOST).strip()


@call
def python() -> None:
    """llm.get_model().prompt(), text(), usage(), json()"""
    answer = llm.get_model("local").prompt("Hello", max_tokens=12)
    assert answer.text()
    assert answer.usage().output > 0


@call
def python_stream() -> None:
    """iterating over a response"""
    assert len(list(llm.get_model("local").prompt("Hello", max_tokens=12))) > 1


@call
def python_conversation() -> None:
    """model.conversation()"""
    talk = llm.get_model("local").conversation()
    assert talk.prompt("Hello", max_tokens=8).text()
    assert talk.prompt("And you?", max_tokens=8).text()


@call
def python_schema() -> None:
    """prompt(schema=pydantic model)"""
    from pydantic import BaseModel

    class Dog(BaseModel, extra="forbid"):  # otherwise a small model may not end
        age: int
        good: bool

    found = json.loads(llm.get_model("local").prompt("A dog", schema=Dog, max_tokens=400).text())
    assert set(found) == {"age", "good"}


@call
def python_tools() -> None:
    """model.chain(tools=[...])"""

    def upper(text: str) -> str:
        """Make a text upper case."""
        return text.upper()

    assert (
        llm.get_model("local")
        .chain("Make it loud: hello", tools=[upper], options={"max_tokens": 24})
        .text()
        is not None
    )


@call
async def python_async() -> None:
    """llm.get_async_model(): await text, async iteration"""
    model: Any = llm.get_async_model("local")
    assert await model.prompt("Hello", max_tokens=8).text()
    assert [part async for part in model.prompt("Hello", max_tokens=8)]


@call
def listed() -> None:
    """llm models"""
    assert "local" in cli("models")


run()
