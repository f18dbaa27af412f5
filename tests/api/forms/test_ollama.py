"""ollama's API: responses follow its documentation (docs/api.md), as lines of JSON."""

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
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
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
LAST = {"done_reason": {"enum": ["stop", "length", "load"]}, **dict.fromkeys(COUNTS, COUNT)}
# Fields that the last object may have. `notes` is not one of ollama's.
OPTIONAL = {
    "notes": {"type": "array", "items": TEXT},
    "context": {"type": "array", "items": COUNT},
}
ANSWER_FIELDS = {
    "/api/chat": {"message": MESSAGE},
    "/api/generate": {"response": TEXT, "thinking": TEXT},
}


def post_lines(served: Served, path: str = "/api/chat", **body: Any) -> list[dict[str, Any]]:
    """Send a request, and return the lines of the response, after validating them against the
    documentation.
    """
    request = {
        "model": "tiny",
        **({"messages": HELLO} if path == "/api/chat" else {"prompt": "Once"}),
        **body,
    }
    answer = httpx.post(served.url + path, json=request)
    assert answer.status_code == 200, answer.text
    streamed = body.get("stream") is not False
    assert answer.headers["content-type"] == (
        "application/x-ndjson" if streamed else "application/json"
    )
    found = [json.loads(line) for line in answer.text.splitlines()]
    for number, entry in enumerate(found):
        last = number == len(found) - 1
        final = {**LAST, **OPTIONAL} if last else {}
        properties = {**PIECE, **ANSWER_FIELDS[path], **final, "logprobs": {}}
        required = {
            *PIECE,
            next(iter(ANSWER_FIELDS[path])),
            *(LAST if last and entry.get("done_reason") != "load" else ()),
        }
        jsonschema.validate(
            entry,
            {"properties": properties, "required": sorted(required), "additionalProperties": False},
        )
        assert entry["done"] == last
    return found


def joined_text(lines: list[dict[str, Any]], name: str = "content") -> str:
    return "".join(
        entry["message"].get(name, "") if "message" in entry else entry["response"]
        for entry in lines
    )


def test_a_response_is_streamed_by_default(tiny: Served) -> None:
    lines = post_lines(tiny, options={"num_predict": 12, "temperature": 0, "num_ctx": 4096})
    (complete,) = post_lines(tiny, options={"num_predict": 12, "temperature": 0}, stream=False)
    assert len(lines) > 3
    assert joined_text(lines) == joined_text([complete]) != ""
    assert [entry["done_reason"] for entry in (lines[-1], complete)] == ["length", "length"]
    assert lines[-1]["eval_count"] == complete["eval_count"] == 12
    assert complete["total_duration"] >= complete["eval_duration"] > 0


def test_thinking_and_calls_are_separate_fields(serve: Callable[..., Served]) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}\n</tool_call>'
    served = serve(f"<think>\nhm\n</think>\n\nI look.\n{call}\n{call}".encode(), n_ctx=2048)
    for stream in (True, False):
        lines = post_lines(served, tools=TOOLS, think=True, stream=stream)
        assert (joined_text(lines), joined_text(lines, "thinking")) == ("I look.", "hm\n")
        calls = [
            entry["function"] for line in lines for entry in line["message"].get("tool_calls", ())
        ]
        assert [(entry["index"], entry["name"], entry["arguments"]) for entry in calls] == [
            (0, "weather", {"a": "yes"}),
            (1, "weather", {"a": "yes"}),
        ]


def test_format_is_enforced(tiny: Served) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert json.loads(joined_text(post_lines(tiny, path, format=SCHEMA)))["a"] in ("yes", "no")
        assert joined_text(
            post_lines(tiny, path, format="json", options={"num_predict": 6})
        ).startswith("{")
    assert json.loads(joined_text(post_lines(tiny, "/api/generate", format=SCHEMA, raw=True)))[
        "a"
    ] in (
        "yes",
        "no",
    )


def test_a_raw_prompt_skips_the_template(serve: Callable[..., Served]) -> None:
    prompts: list[str] = []

    def next_token(tokens: list[int]) -> int:
        prompts.append(bytes(token for token in tokens if token < 256).decode())
        return 257

    served = serve(next_token)
    post_lines(served, "/api/generate", prompt="Hi", system="Be brief.")
    assert prompts[-1] == "<system>Be brief.\n<user>Hi\n<assistant>"
    post_lines(served, "/api/generate", prompt="Hi", raw=True)
    assert prompts[-1] == "Hi"
    post_lines(serve(next_token, template=None), "/api/generate", prompt="Hi")
    assert prompts[-1] == "Hi"
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"a": "yes"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    post_lines(serve(next_token, n_ctx=2048), messages=messages)
    assert '<tool_call>\n{"name": "weather", "arguments": {"a": "yes"}}' in prompts[-1]
    assert "<tool_response>\nsunny" in prompts[-1]


def test_a_request_without_a_prompt_reports_a_loaded_model(serve: Callable[..., Served]) -> None:
    served = serve()
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})):
        for stream in (True, False):
            (line,) = post_lines(served, path, stream=stream, keep_alive="5m", **body)
            assert line["done_reason"] == "load"
    assert served.bridge.metrics.last_token_age is None


@pytest.mark.parametrize(
    ("path", "body", "message", "status"),
    [
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
        ("/api/chat", {"think": "much"}, "think must be one of", 400),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "the context holds 512",
            400,
        ),
        ("/api/generate", {"suffix": "x"}, "has no fim_pre, fim_suf, fim_mid token", 501),
        ("/api/generate", {"context": [-1]}, "context has -1, which is no token", 400),
        ("/api/generate", {"context": [99999]}, "context has 99999, which is no token", 400),
        ("/api/show", {}, "name is missing", 400),
        ("/api/embed", {}, "input is missing", 400),
        ("/api/embeddings", {"prompt": []}, "prompt must be text, not a list", 400),
        ("/api/show", {"model": ""}, "name is missing", 400),
        (
            "/api/chat",
            {
                "messages": [
                    *HELLO,
                    {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
                ]
            },
            "messages[1].content[0]: this server reads only text, not image_url",
            400,
        ),
        ("/api/pull", {"model": "x"}, "this server serves only tiny", 404),
    ],
)
def test_an_error_is_a_single_message(
    serve: Callable[..., Served], path: str, body: dict, message: str, status: int
) -> None:
    prompt_field = (
        {"messages": HELLO}
        if path == "/api/chat"
        else {"prompt": "x"}
        if path == "/api/generate"
        else {}
    )
    answer = httpx.post(serve().url + path, json={**prompt_field, **body})
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert message in answer.json()["error"]


def test_every_name_of_the_model_is_listed(serve: Callable[..., Served]) -> None:
    served = serve(names=("tiny", "llama3:latest"))
    get = lambda path: httpx.get(f"{served.url}/api/{path}").json()  # noqa: E731
    for path in ("tags", "ps"):
        assert [entry["name"] for entry in get(path)["models"]] == ["tiny", "llama3:latest"]
    assert all(
        len(entry["digest"]) == 64 and entry["details"]["format"] == "gguf"
        for entry in get("tags")["models"]
    )
    assert len(get("version")["version"].split(".")) == 3
    for name in ("tiny", "tiny:latest", "llama3", "llama3:latest"):
        details = httpx.post(f"{served.url}/api/show", json={"model": name}).json()
        assert details["capabilities"] == ["completion", "tools"]
        assert details["model_info"]["general.architecture"] == details["details"]["family"]
        assert joined_text(post_lines(served, model=name)) == "hello"


def test_texts_become_vectors(tiny: Served) -> None:
    def post(path, **body):
        return httpx.post(f"{tiny.url}/api/{path}", json={"model": "tiny:latest", **body}).json()

    vectors = post("embed", input=["a cat", "a dog"], truncate=True)
    assert len(vectors["embeddings"]) == 2 and vectors["prompt_eval_count"] > 0
    vector = post("embeddings", prompt="a cat")["embedding"]
    assert vector == pytest.approx(vectors["embeddings"][0], abs=1e-3)
    assert len(post("embed", input="a cat", dimensions=4)["embeddings"][0]) == 4
