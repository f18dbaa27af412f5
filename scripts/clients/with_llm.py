"""The documented commands and Python calls of simonw's llm, run against the server's OpenAI API."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.clients.calls import MODEL, call, run

URL = sys.argv[1]
HOME = Path(os.environ["LLM_USER_PATH"])
HOME.mkdir(parents=True, exist_ok=True)
(HOME / "extra-openai-models.yaml").write_text(f"""
- model_id: local
  model_name: {MODEL}
  api_base: {URL}
  supports_schema: true
  supports_tools: true
- model_id: local-completion
  model_name: {MODEL}
  api_base: {URL}
  completion: true
""")

import llm  # noqa: E402 (it reads the file when it is imported)

MAX_TOKENS = ("-o", "max_tokens", "24")


def cli(*words: str, stdin: str | None = None) -> str:
    """Run one command line of llm with the text `stdin`; return its stdout. Raises AssertionError
    if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "llm", *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout


@call
def prompt() -> None:
    """llm -m MODEL PROMPT"""
    assert cli("-m", "local", "Ten names for a cat", *MAX_TOKENS).strip()


@call
def plain() -> None:
    """llm --no-stream -s SYSTEM, with the prompt on stdin"""
    assert cli("-m", "local", "--no-stream", "-s", "Translate", *MAX_TOKENS, stdin="Hello").strip()


@call
def options() -> None:
    """Check that the server obeys temperature, top_p, seed, stop, penalties, logit_bias and
    json_object of `llm -o`.
    """
    sampling = [
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
        "-m",
        "local",
        "Hello",
        *MAX_TOKENS,
        *sampling,
        "-o",
        "logit_bias",
        '{"5": -10}',
        "-o",
        "stop",
        "zzz",
    ).strip()
    assert cli("-m", "local", "JSON", *MAX_TOKENS, "-o", "json_object", "1").strip().startswith("{")


@call
def continue_conversation() -> None:
    """llm -c (continue a conversation), llm logs with token usage"""
    cli("-m", "local", "My name is Ann", *MAX_TOKENS)
    assert cli("-c", "What is my name?", *MAX_TOKENS).strip()
    log = json.loads(cli("logs", "-n", "1", "--json"))
    assert log[0]["input_tokens"] > 0
    assert log[0]["output_tokens"] > 0


@call
def chat() -> None:
    """llm chat"""
    assert "Chatting with local" in cli("chat", "-m", "local", *MAX_TOKENS, stdin="Hello\nexit\n")


@call
def schema() -> None:
    """llm schemas dsl, llm --schema"""
    closed = json.loads(cli("schemas", "dsl", "age int, good bool")) | {
        "additionalProperties": False
    }  # without it, a small model may add fields without end
    document = json.loads(
        cli("-m", "local", "--schema", json.dumps(closed), "A dog", "-o", "max_tokens", "400")
    )
    assert set(document) == {"age", "good"}


@call
def tools() -> None:
    """llm --functions (a tool as Python code) with --td (tools debug)"""
    code = "def multiply(x: int, y: int) -> int:\n    'Multiply two numbers'\n    return x * y\n"
    cli("-m", "local", "--functions", code, "--td", "What is 6 times 7?", *MAX_TOKENS)


@call
def completion() -> None:
    """llm -m with a completion model"""
    assert cli("-m", "local-completion", "Once upon a time", *MAX_TOKENS).strip()


@call
def python() -> None:
    """llm.get_model().prompt(), text(), usage(), json()"""
    answer = llm.get_model("local").prompt("Hello", max_tokens=12)
    assert answer.text()
    assert answer.usage().output > 0


@call
def python_stream() -> None:
    """iteration over the response of llm.get_model().prompt()"""
    assert len(list(llm.get_model("local").prompt("Hello", max_tokens=12))) > 1


@call
def python_conversation() -> None:
    """model.conversation()"""
    conversation = llm.get_model("local").conversation()
    assert conversation.prompt("Hello", max_tokens=8).text()
    assert conversation.prompt("And you?", max_tokens=8).text()


@call
def python_schema() -> None:
    """prompt(schema=pydantic model)"""
    from pydantic import BaseModel

    class Dog(BaseModel, extra="forbid"):  # without it, a small model may add fields without end
        age: int
        good: bool

    document = json.loads(llm.get_model("local").prompt("A dog", schema=Dog, max_tokens=400).text())
    assert set(document) == {"age", "good"}


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
    """llm.get_async_model(): await text(), async iteration"""
    model: Any = llm.get_async_model("local")
    assert await model.prompt("Hello", max_tokens=8).text()
    assert [part async for part in model.prompt("Hello", max_tokens=8)]


@call
def list_models() -> None:
    """llm models"""
    assert "local" in cli("models")


run()
