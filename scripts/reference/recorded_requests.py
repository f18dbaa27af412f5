"""The HTTP, WebSocket and gRPC requests that json_documents.py sends to a server of SmolLM2."""

from dataclasses import dataclass, field
from typing import Any

from scripts.reference.recorded_commands import SCHEMA, SMOLLM2

KEY = "secret-key-1"
NAME = "local"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER},
}
ANTHROPIC_TOOL = {"name": "get_weather", "description": "Of a city", "input_schema": WEATHER}
RESPONSES_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Of a city",
    "parameters": WEATHER,
}
GREEDY = {"temperature": 0, "max_tokens": 6}
CHAT = {"messages": HELLO, **GREEDY}
SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
}
SERVER_OPTIONS = (
    f"{SMOLLM2} -s 1 -np 2 -c 2048 --port 0 -a {NAME} --api-key {KEY} --stream-every 0 --json"
)


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request to record. It is a GET if it has neither `body` (JSON) nor `raw` (bytes).
    `name` is part of the entry's name.
    """

    name: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {KEY}"})
    raw: bytes | None = None


REQUESTS = (
    HttpRequest("health", "/health", headers={}),
    HttpRequest("models", "/v1/models"),
    HttpRequest("one model", f"/v1/models/{NAME}"),
    HttpRequest("props", "/props"),
    HttpRequest("chat", "/v1/chat/completions", CHAT),
    HttpRequest("chat cached", "/v1/chat/completions", CHAT),
    HttpRequest(
        "chat streamed",
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    HttpRequest(
        "chat logprobs", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}
    ),
    HttpRequest(
        "chat several",
        "/v1/chat/completions",
        {"messages": HELLO, "n": 2, "seed": 5, "max_tokens": 4, "stop": ["!"]},
    ),
    HttpRequest("chat beams", "/v1/chat/completions", CHAT | {"beams": 2}),
    HttpRequest(
        "chat schema",
        "/v1/chat/completions",
        CHAT | {"response_format": SCHEMA_FORMAT, "max_tokens": 60},
    ),
    HttpRequest(
        "chat tool call",
        "/v1/chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    ),
    HttpRequest(
        "chat tool call streamed",
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "max_tokens": 60,
            "stream": True,
        },
    ),
    HttpRequest("completions", "/v1/completions", {"prompt": "The sky is", **GREEDY}),
    HttpRequest(
        "completions echo",
        "/v1/completions",
        {"prompt": "The sky is", **GREEDY, "echo": True, "logprobs": 2},
    ),
    HttpRequest(
        "completions streamed",
        "/v1/completions",
        {"prompt": "The sky is", **GREEDY, "stream": True},
    ),
    HttpRequest(
        "responses",
        "/v1/responses",
        {"input": "Say hello.", "temperature": 0, "max_output_tokens": 6},
    ),
    HttpRequest(
        "responses streamed",
        "/v1/responses",
        {"input": "Say hello.", "temperature": 0, "max_output_tokens": 6, "stream": True},
    ),
    HttpRequest(
        "responses tool call",
        "/v1/responses",
        {
            "input": "Say hello.",
            "temperature": 0,
            "max_output_tokens": 60,
            "tools": [RESPONSES_TOOL],
            "tool_choice": "required",
        },
    ),
    HttpRequest("responses input_tokens", "/v1/responses/input_tokens", {"input": "Say hello."}),
    HttpRequest("messages", "/v1/messages", CHAT | {"model": NAME}),
    HttpRequest("messages streamed", "/v1/messages", CHAT | {"model": NAME, "stream": True}),
    HttpRequest(
        "messages tool use",
        "/v1/messages",
        CHAT
        | {
            "model": NAME,
            "max_tokens": 60,
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "any"},
        },
    ),
    HttpRequest(
        "messages count_tokens", "/v1/messages/count_tokens", {"model": NAME, "messages": HELLO}
    ),
    HttpRequest("messages without max_tokens", "/v1/messages", {"model": NAME, "messages": HELLO}),
    HttpRequest(
        "completion", "/completion", {"prompt": "The sky is", "n_predict": 6, "temperature": 0}
    ),
    HttpRequest(
        "completion streamed",
        "/completion",
        {"prompt": "The sky is", "n_predict": 6, "temperature": 0, "stream": True},
    ),
    HttpRequest(
        "completion probabilities",
        "/completion",
        {"prompt": "The sky", "n_predict": 3, "temperature": 0, "n_probs": 2},
    ),
    HttpRequest("infill", "/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 4}),
    HttpRequest("tokenize", "/tokenize", {"content": "Say hello.", "with_pieces": True}),
    HttpRequest("detokenize", "/detokenize", {"tokens": [19556, 17]}),
    HttpRequest("apply-template", "/apply-template", {"messages": HELLO}),
    HttpRequest(
        "embeddings", "/v1/embeddings", {"input": ["Say hello.", "Good night."], "dimensions": 4}
    ),
    HttpRequest(
        "embeddings in base64",
        "/v1/embeddings",
        {"input": "Say hello.", "dimensions": 4, "encoding_format": "base64"},
    ),
    HttpRequest("rerank", "/v1/rerank", {"query": "night", "documents": ["day", "moon"]}),
    HttpRequest("ollama tags", "/api/tags"),
    HttpRequest("ollama ps", "/api/ps"),
    HttpRequest("ollama version", "/api/version"),
    HttpRequest("ollama show", "/api/show", {"model": NAME}),
    HttpRequest(
        "ollama chat",
        "/api/chat",
        {
            "model": NAME,
            "messages": HELLO,
            "stream": False,
            "options": {"temperature": 0, "num_predict": 6},
        },
    ),
    HttpRequest(
        "ollama chat streamed",
        "/api/chat",
        {"model": NAME, "messages": HELLO, "options": {"temperature": 0, "num_predict": 6}},
    ),
    HttpRequest(
        "ollama generate",
        "/api/generate",
        {
            "model": NAME,
            "prompt": "Say hello.",
            "stream": False,
            "options": {"temperature": 0, "num_predict": 6},
        },
    ),
    HttpRequest(
        "ollama embed", "/api/embed", {"model": NAME, "input": "Say hello.", "dimensions": 4}
    ),
    HttpRequest("slots", "/slots"),
    HttpRequest("kv", "/v1/kv?check=true"),
    HttpRequest("metrics", "/metrics"),
    HttpRequest("page", "/", headers={}),
    HttpRequest("no key", "/v1/models", headers={}),
    HttpRequest("no such path", "/v1/nothing"),
    HttpRequest("wrong method", "/v1/chat/completions"),
    HttpRequest("broken JSON", "/v1/chat/completions", raw=b'{"messages": '),
    HttpRequest("unknown model", "/v1/chat/completions", CHAT | {"model": "gpt-9"}),
    HttpRequest("wrong value", "/v1/chat/completions", CHAT | {"temperature": "warm"}),
    HttpRequest(
        "refused field",
        "/v1/chat/completions",
        CHAT | {"audio": {"voice": "alloy", "format": "wav"}},
    ),
    HttpRequest("too long", "/v1/completions", {"prompt": "word " * 3000, **GREEDY}),
    HttpRequest("ollama unknown model", "/api/chat", {"model": "gpt-9", "messages": HELLO}),
    HttpRequest("messages unknown model", "/v1/messages", CHAT | {"model": "gpt-9"}),
)

WEBSOCKET_MESSAGES = (
    {"id": "a", "path": "/v1/chat/completions", "body": CHAT},
    {"id": "b", "path": "/v1/nothing", "body": {}},
    {"id": "c", "path": "/v1/embeddings", "body": {"input": "Say hello.", "dimensions": 4}},
)
GRPC_CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Health", "HealthRequest", {}),
    ("Tokenize", "TokenizeRequest", {"text": "Say hello."}),
    ("Embed", "EmbedRequest", {"texts": ["Say hello."], "dimensions": 4}),
    ("Generate", "GenerateRequest", {"messages": HELLO, "max_tokens": 6, "temperature": 0}),
)
