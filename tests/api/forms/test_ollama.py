"""ollama's API: the shapes of its documentation (docs/api.md), JSON lines, and calls of its
clients.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest

from tests.fixtures.server import Served

HELLO = [{"role": "user", "content": "Once upon a time"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a day", "parameters": SCHEMA},
    }
]
TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}
CALLS = {
    "type": "array",
    "items": {
        "required": ["function"],
        "properties": {
            "function": {
                "required": ["name", "arguments"],
                "properties": {"name": TEXT, "arguments": {"type": "object"}},
            }
        },
    },
}
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {
        "role": {"const": "assistant"},
        "content": TEXT,
        "thinking": TEXT,
        "tool_calls": CALLS,
    },
}
COUNTS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)
PIECE = {
    "model": TEXT,
    "created_at": {"type": "string", "format": "date-time"},
    "done": {"type": "boolean"},
}
LAST = {"done_reason": {"enum": ["stop", "length", "load"]}, **dict.fromkeys(COUNTS, WHOLE)}
SAYS = {"/api/chat": {"message": MESSAGE}, "/api/generate": {"response": TEXT, "thinking": TEXT}}


def ask(served: Served, path: str = "/api/chat", **body: Any) -> list[dict[str, Any]]:
    """The lines of an answer, each of the documented shape; the last of them tells why and how
    much.
    """
    asked = {
        "model": "tiny",
        **({"messages": HELLO} if path == "/api/chat" else {"prompt": "Once"}),
        **body,
    }
    answer = httpx.post(served.url + path, json=asked)
    assert answer.status_code == 200, answer.text
    streamed = body.get("stream") is not False
    assert answer.headers["content-type"] == (
        "application/x-ndjson" if streamed else "application/json"
    )
    found = [json.loads(line) for line in answer.text.splitlines()]
    for number, one in enumerate(found):
        last = number == len(found) - 1
        known = {**PIECE, **SAYS[path], **(LAST if last else {}), "logprobs": {}}
        needed = {
            *PIECE,
            next(iter(SAYS[path])),
            *(LAST if last and one.get("done_reason") != "load" else ()),
        }
        jsonschema.validate(
            one, {"properties": known, "required": sorted(needed), "additionalProperties": False}
        )
        assert one["done"] == last
    return found


def said(lines: list[dict[str, Any]], name: str = "content") -> str:
    return "".join(
        one["message"].get(name, "") if "message" in one else one["response"] for one in lines
    )


def test_a_conversation_is_streamed_unless_told_otherwise(tiny: Served) -> None:
    lines = ask(tiny, options={"num_predict": 12, "temperature": 0, "num_ctx": 4096})
    (whole,) = ask(tiny, options={"num_predict": 12, "temperature": 0}, stream=False)
    assert len(lines) > 3
    assert said(lines) == said([whole]) != ""
    assert [one["done_reason"] for one in (lines[-1], whole)] == ["length", "length"]
    assert lines[-1]["eval_count"] == whole["eval_count"] == 12
    assert whole["total_duration"] >= whole["eval_duration"] > 0


def test_thinking_and_calls_stand_apart(serve: Callable[..., Served]) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}\n</tool_call>'
    served = serve(f"<think>\nhm\n</think>\n\nI look.\n{call}\n{call}".encode(), n_ctx=2048)
    for stream in (True, False):
        lines = ask(served, tools=TOOLS, think=True, stream=stream)
        assert (said(lines), said(lines, "thinking")) == ("I look.", "hm\n")
        calls = [one["function"] for line in lines for one in line["message"].get("tool_calls", ())]
        assert [(one["index"], one["name"], one["arguments"]) for one in calls] == [
            (0, "weather", {"a": "yes"}),
            (1, "weather", {"a": "yes"}),
        ]


def test_an_answer_has_the_form_that_is_asked_for(tiny: Served) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert json.loads(said(ask(tiny, path, format=SCHEMA)))["a"] in ("yes", "no")
        assert said(ask(tiny, path, format="json", options={"num_predict": 6})).startswith("{")
    assert json.loads(said(ask(tiny, "/api/generate", format=SCHEMA, raw=True)))["a"] in (
        "yes",
        "no",
    )


def test_a_prompt_goes_through_the_template_or_as_it_is(serve: Callable[..., Served]) -> None:
    read: list[str] = []

    def speak(tokens: list[int]) -> int:
        read.append(bytes(token for token in tokens if token < 256).decode())
        return 257

    served = serve(speak)
    ask(served, "/api/generate", prompt="Hi", system="Be brief.")
    assert read[-1] == "<system>Be brief.\n<user>Hi\n<assistant>"
    ask(served, "/api/generate", prompt="Hi", raw=True)
    assert read[-1] == "Hi"
    ask(serve(speak, template=None), "/api/generate", prompt="Hi")
    assert read[-1] == "Hi"
    talk = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"a": "yes"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    ask(serve(speak, n_ctx=2048), messages=talk)
    assert '<tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}' in read[-1]
    assert "<tool_response>\nsunny" in read[-1]


def test_nothing_asked_for_is_a_model_that_is_loaded(serve: Callable[..., Served]) -> None:
    served = serve()
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})):
        for stream in (True, False):
            (only,) = ask(served, path, stream=stream, keep_alive="5m", **body)
            assert only["done_reason"] == "load"
    assert served.bridge.metrics.last_token_age is None


@pytest.mark.parametrize(
    ("path", "body", "told", "status"),
    [
        ("/api/chat", {"model": "other"}, "not served here", 404),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]},
            "reads only text",
            400,
        ),
        ("/api/chat", {"messages": [{"content": "x"}]}, "role is missing", 400),
        ("/api/chat", {"options": {"temperature": "hot"}}, "temperature takes a number", 400),
        ("/api/chat", {"options": {"num_predict": -5}}, "options.num_predict must be", 400),
        ("/api/chat", {"format": "xml"}, "json or a JSON schema", 400),
        ("/api/chat", {"think": "much"}, "reasoning_effort must be one of", 400),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "the context holds 512",
            400,
        ),
        ("/api/generate", {"suffix": "x"}, "suffix is not supported", 400),
        ("/api/generate", {"context": [1]}, "send the conversation to /api/chat", 400),
        ("/api/show", {}, "name is missing", 400),
        ("/api/show", {"model": "other"}, "not served here", 404),
        ("/api/embed", {}, "input is missing", 400),
        ("/api/pull", {"model": "x"}, "does not exist", 404),
    ],
)
def test_errors_are_words(
    serve: Callable[..., Served], path: str, body: dict, told: str, status: int
) -> None:
    more = (
        {"messages": HELLO}
        if path == "/api/chat"
        else {"prompt": "x"}
        if path == "/api/generate"
        else {}
    )
    answer = httpx.post(serve().url + path, json={**more, **body})
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert told in answer.json()["error"]


def test_models_are_told_under_their_names(serve: Callable[..., Served]) -> None:
    served = serve(names=("tiny", "llama3:latest"))
    get = lambda path: httpx.get(f"{served.url}/api/{path}").json()  # noqa: E731
    for path in ("tags", "ps"):
        assert [one["name"] for one in get(path)["models"]] == ["tiny", "llama3:latest"]
    assert all(
        len(one["digest"]) == 64 and one["details"]["format"] == "gguf"
        for one in get("tags")["models"]
    )
    assert len(get("version")["version"].split(".")) == 3
    for name in ("tiny", "tiny:latest", "llama3", "llama3:latest"):
        shown = httpx.post(f"{served.url}/api/show", json={"model": name}).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["general.architecture"] == shown["details"]["family"]
        assert said(ask(served, model=name)) == "hello"


def test_texts_become_vectors(tiny: Served) -> None:
    def post(path, **body):
        return httpx.post(f"{tiny.url}/api/{path}", json={"model": "tiny:latest", **body}).json()

    both = post("embed", input=["a cat", "a dog"], truncate=True)
    assert len(both["embeddings"]) == 2 and both["prompt_eval_count"] > 0
    one = post("embeddings", prompt="a cat")["embedding"]
    assert one == pytest.approx(both["embeddings"][0], abs=1e-3)
    assert len(post("embed", input="a cat", dimensions=4)["embeddings"][0]) == 4
