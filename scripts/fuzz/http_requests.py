#!/usr/bin/env python3
"""Send HTTP requests with one unexpected value each, and check that none is answered with an error
of the server.

usage: .venv/bin/python scripts/fuzz/http_requests.py FILE.gguf [--requests 0] [--at-once 8]
       [--seed 0] [-- FLAGS of serve]

The script starts its own server. The valid requests below have every field that their path accepts.
Each field and list item in them, at any depth, is set to each of VALUES (null, other types, huge,
negative, invalid JSON numbers, empty, nested, half surrogate pairs), removed, or duplicated.
`--requests N` sends N of these requests at random (0: all). An answer is right if it is 200 with a
strict JSON document (or a stream of them), or a 4xx with the error object of the API. Failures are
a 500, a broken connection, a dead server, and a wrong cell count when the server is idle. The
script prints the failures and exits with 1 if there are any.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[2]
RAW = "\u2400"  # a string that begins with this is put into the body without it and without quotes
DEPTH = 300
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
TOOL = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
# Values for every field. 1e999 is valid JSON, but too large for a double.
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    -0.5,
    2**31,
    2**63,
    -(2**63),
    2**64,
    10**400,
    -(10**400),
    1e308,
    5e-324,
    -0.0,
    RAW + "1e999",
    RAW + "-1e999",
    RAW + "NaN",
    RAW + "Infinity",
    RAW + "1" + "0" * 5000,
    "",
    "x",
    "0",
    "true",
    "null",
    "auto",
    "\ud800",
    "\udc00\ud800",
    "\0",
    "\u2028",
    "word " * 2000,
    "9" * 3000,
    [],
    {},
    [[]],
    [{}],
    [None],
    [0],
    [-1],
    [2**70],
    [0.5],
    [""],
    ["x"],
    [True],
    ["x", 0],
    ["x"] * 300,
    [[0], "x"],
    {"": ""},
    {"a": None},
    {"type": "x"},
    {"type": None},
    {"type": "text"},
    {"type": "function"},
    {"a": {"a": {"a": []}}},
    {"x": 10**400},
    {"\ud800": "\0"},
    RAW + "[" * DEPTH + "]" * DEPTH,
    RAW + '{"a":' * DEPTH + "0" + "}" * DEPTH,
    RAW + "[" * 20_000 + "]" * 20_000,
]
REMOVED, DUPLICATED = object(), object()
# The fields of an error object of OpenAI's API, and the fewer fields of Anthropic's and ollama's.
ERROR_FIELDS, OTHER_ERROR_FIELDS = (
    {"message", "type", "param", "code"},
    {"/v1/messages": {"message", "type"}, "/api/": {"message"}},
)
SETTINGS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "typical": 0.9,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repeat_penalty": 1.1,
    "repeat_last_n": 16,
    "logit_bias": {"5": 1, "6": -100},
    "dry_multiplier": 0.5,
    "xtc_probability": 0.1,
    "mirostat": 0,
    "stop": ["zz", "yy"],
    "max_tokens": 2,
    "ignore_eos": False,
    "priority": 1,
    "stream": False,
    "model": None,
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
}
# Settings that few clients send. They come in requests of their own, because each combination is
# slow.
OTHER_SETTINGS = {
    "samplers": ["penalties", "top_k", "temperature"],
    "dry_sequence_breakers": ["\n", ":"],
    "top_n_sigma": 1.5,
    "dynatemp_range": 0.1,
    "stop_token_ids": [5, 6],
    "t_max_predict_ms": 500,
    "n_indent": 1,
    "n_keep": -1,
    "truncate_prompt_tokens": 300,
    "truncation_side": "left",
    "n_probs": 2,
    "return_tokens_as_token_ids": True,
    "return_progress": True,
    "timings_per_token": True,
}
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Look."}], "name": "me"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "function": {"name": "look", "arguments": '{"a": "no"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "dark"},
]
CHAT = {
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "n": 2,
    "parallel_tool_calls": True,
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 2,
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "continue_final_message": False,
    "add_generation_prompt": True,
    "modalities": ["text"],
    **SETTINGS,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES[:1], "response_format": FORMAT, "max_tokens": 3, "stream": True},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES[:1],
            "grammar": 'root ::= "a"',
            "json_schema": None,
            "max_tokens": 3,
            **OTHER_SETTINGS,
        },
    ),
    *(
        ("/v1/chat/completions", {"messages": MESSAGES[:1], "max_tokens": 2, **settings})
        for settings in (
            {"json_schema": SCHEMA},
            {"guided_json": SCHEMA},
            {"guided_regex": "[a-c]+"},
            {"guided_choice": ["yes", "no"]},
            {"guided_grammar": 'start: "a"'},
            {"structured_outputs": {"choice": ["yes"], "json": None, "regex": None}},
            {"allowed_token_ids": [400, 401]},
            {"n_probs": 2, "post_sampling_probs": True, "min_tokens": 1},
        )
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [*MESSAGES[:1], {"role": "assistant", "content": "Yes, "}],
            "tools": [
                {"type": "custom", "custom": {"name": "shell", "format": {"type": "text"}}},
                {"type": "web_search"},
                {"type": "function", "function": TOOL},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "look"}}],
                },
            },
            "enable_thinking": False,
            "reasoning": {"effort": "low"},
            "thinking": {"type": "disabled"},
            "reasoning_format": "none",
            "include_reasoning": True,
            "max_tokens": 2,
            "zz_unknown": {"a": [1]},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES[:1],
            "beams": 2,
            "length_penalty": 1.0,
            "early_stopping": True,
            "max_tokens": 2,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["Once", [5, 6]],
            "n": 1,
            "best_of": 2,
            "logprobs": 2,
            "echo": False,
            "suffix": None,
            "stream_options": None,
            "n_predict": 2,
            "response_format": {"type": "text"},
            **SETTINGS,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": "Once",
            "max_tokens": 2,
            "stream": True,
            "echo": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/completions", {"prompt": ["Once", [5, 6]], "max_tokens": 1, "echo": True, "logprobs": 1}),
    (
        "/completion",
        {
            "prompt": ["Once", [5, "upon", 6], {"prompt_string": "x"}],
            "n_predict": 2,
            "n_probs": 1,
            "n_cmpl": 1,
            "logit_bias": [[5, 1.5], ["a", False]],
            "return_tokens": True,
            "stream": True,
            "response_fields": None,
            "json_schema": None,
        },
    ),
    (
        "/completion",
        {"prompt": "Once", "n_predict": 1, "response_fields": ["content", "timings/prompt_n"]},
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "dark"},
                {"type": "reasoning", "summary": []},
            ],
            "instructions": "Be short.",
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 2,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "truncation": "disabled",
            "temperature": 0.5,
            "top_p": 0.9,
            "stream": True,
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "custom_tool_call", "call_id": "d", "name": "shell", "input": "ls"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "a"},
                {"type": "web_search_call", "id": "w", "status": "completed"},
                {"type": "item_reference", "id": "x"},
            ],
            "tools": [
                {"type": "custom", "name": "shell", "description": "Runs."},
                {"type": "web_search", "search_context_size": "low"},
                {
                    "type": "namespace",
                    "name": "files",
                    "tools": [{"type": "function", "name": "open", "parameters": SCHEMA}],
                },
            ],
            "max_output_tokens": 2,
            "truncation": "auto",
            "context_management": [{"type": "compaction", "compact_threshold": 100000}],
            "stop": ["zz"],
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "c", "name": "look", "input": {"a": "no"}}
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "dark"}],
                },
            ],
            "system": [{"type": "text", "text": "Be short."}],
            "max_tokens": 2,
            "stop_sequences": ["zz"],
            "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
            "stream": True,
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "temperature": 0.5,
            "top_k": 5,
            "metadata": {"user_id": "me"},
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {"type": "text", "media_type": "text/plain", "data": "A."},
                            "title": "T",
                            "context": "C",
                        },
                        {
                            "type": "search_result",
                            "source": "here",
                            "title": "T",
                            "content": [{"type": "text", "text": "B."}],
                        },
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "text", "text": "I see"},
                    ],
                },
            ],
            "max_tokens": 2,
            "tools": [
                {"type": "web_search_20250305", "name": "web_search"},
                {"type": "bash_20250124", "name": "bash"},
            ],
            "context_management": {
                "edits": [
                    {
                        "type": "clear_tool_uses_20250919",
                        "trigger": {"type": "input_tokens", "value": 50000},
                    }
                ]
            },
            "output_config": {"effort": "low"},
        },
    ),
    (
        "/v1/chat/completions/input_tokens",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]},
    ),
    ("/v1/completions/input_tokens", {"prompt": ["Once", [5, 6]]}),
    ("/v1/responses/input_tokens", {"input": "Look.", "instructions": "Be short."}),
    (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "Look."}], "system": "Be short."},
    ),
    (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": {"a": "no"}}}],
                },
                {"role": "tool", "tool_name": "look", "content": "dark"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "options": {
                "num_predict": 2,
                "temperature": 0.5,
                "stop": ["zz"],
                "seed": 7,
                "num_ctx": 64,
            },
            "think": False,
            "keep_alive": "5m",
            "stream": True,
        },
    ),
    (
        "/api/generate",
        {
            "prompt": "Look.",
            "system": "Be short.",
            "format": SCHEMA,
            "raw": False,
            "stream": False,
            "options": {"num_predict": 2},
            "context": None,
            "images": [],
        },
    ),
    (
        "/api/generate",
        {
            "prompt": "Look.",
            "system": "Be short.",
            "template": "{{ if .System }}{{ .System }} {{ end }}{{ .Prompt }}",
            "context": [5, 6],
            "truncate": True,
            "logprobs": True,
            "top_logprobs": 1,
            "options": {"num_predict": 2, "num_keep": 1},
        },
    ),
    ("/api/embed", {"input": ["Once", "upon"], "truncate": True, "dimensions": 8}),
    ("/api/embeddings", {"prompt": "Once", "model": "tiny"}),
    ("/api/show", {"model": "tiny", "verbose": True}),
    ("/apply-template", {"messages": MESSAGES}),
    (
        "/v1/embeddings",
        {"input": ["Once", "upon"], "encoding_format": "float", "dimensions": 8, "model": None},
    ),
    (
        "/tokenize",
        {"content": "Once", "add_special": True, "parse_special": True, "with_pieces": True},
    ),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/api/pull", {"model": "tiny", "stream": False, "insecure": True}),
]
# A generating model can neither rank nor infill, and a server changes no models and saves no slots.
# It refuses these, most of them only after it has read all fields.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/rerank",
        {
            "query": "Look.",
            "documents": ["dark", {"text": "light"}],
            "top_n": 1,
            "return_documents": True,
        },
    ),
    ("/v1/completions", {"prompt": "Once", "suffix": "time", "max_tokens": 2}),
    ("/v1/chat/completions/control", {"id": "chatcmpl-0", "action": "reasoning_end"}),
    ("/api/generate", {"prompt": "Once", "suffix": "time", "options": {"num_predict": 2}}),
    (
        "/infill",
        {
            "input_prefix": "a",
            "input_suffix": "b",
            "prompt": "c",
            "n_predict": 1,
            "input_extra": [{"filename": "a", "text": "b"}],
        },
    ),
    (
        "/v1/rerank",
        {"query": "Look.", "texts": ["dark", "light"], "return_text": True, "model": None},
    ),
    ("/api/create", {"model": "mine", "from": "tiny", "parameters": {"temperature": 1}}),
    ("/api/copy", {"source": "tiny", "destination": "mine"}),
    ("/api/push", {"model": "tiny", "stream": False}),
    ("/api/blobs/{digest}", {"any": "body"}),
    ("/slots/{slot}", {"filename": "a"}),
    (
        "/v1/batches",
        {
            "input_file_id": "file-unknown",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    ),
    ("/v1/batches/{batch_id}/cancel", {"any": "body"}),
    ("/v1/files", {"any": "body"}),  # takes a form, not JSON
]


def key_paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field and list item in a JSON document, as a tuple of keys and
    indexes.
    """
    if not isinstance(document, dict | list):
        return
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*path, key)
        yield from key_paths(value, (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> bytes:
    """Return the document as JSON with `value` at `path`. REMOVED removes the field, and DUPLICATED
    writes it twice.
    """
    changed = deepcopy(document)
    container = changed
    for key in path[:-1]:
        container = container[key]
    if value is REMOVED:
        del container[path[-1]]
    elif value is DUPLICATED:
        text = json.dumps(container)
        return encode(document).replace(
            text.encode(), f'{text[:-1]}, "{path[-1]}": "again"}}'.encode(), 1
        )
    else:
        container[path[-1]] = value
    return encode(changed)


def encode(document: Any) -> bytes:
    """Return a document as JSON, with strings that begin with RAW written without quotes."""
    parts = json.dumps(document).split(json.dumps(RAW)[:-1])
    return (parts[0] + "".join(part.replace('"', "", 1) for part in parts[1:])).encode()


def cases() -> list[tuple[str, bytes]]:
    """Return every path with every changed body."""
    requests = []
    for path, body in VALID + REFUSED:
        for key_path in key_paths(body):
            values = (
                [REMOVED, *VALUES]
                if isinstance(key_path[-1], int)
                else [REMOVED, DUPLICATED, *VALUES]
            )
            requests += [(path, with_value(body, key_path, value)) for value in values]
    return requests


def find_problem(path: str, status: int, raw: bytes) -> str:
    """Return a description of what is wrong with an answer, or "" if it is right. `raw` is the
    body.
    """
    try:
        if status == 200:
            for document in documents(raw):
                if isinstance(document, dict) and document.get("error"):
                    return f"a stream ended with {document['error']}"
            return ""
        error_object = parse_strict(raw)["error"]
        fields = next(
            (fields for prefix, fields in OTHER_ERROR_FIELDS.items() if path.startswith(prefix)),
            ERROR_FIELDS,
        )
        error_object = {"message": error_object} if isinstance(error_object, str) else error_object
        if (
            (not 400 <= status < 500 and status != 501)
            or not error_object["message"]
            or not set(error_object) >= fields
        ):
            return f"{status} {error_object}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{status} with {raw[:200]!r}: {error}"
    return ""


def documents(raw: bytes) -> Iterator[Any]:
    """Yield the JSON document of an answer, or each document of a stream. Raises ValueError for
    invalid JSON.
    """
    if not raw.startswith((b"data:", b"event:", b":")):
        yield from map(parse_strict, raw.splitlines() if raw.startswith(b"{") else [raw])
        return
    for line in raw.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield parse_strict(line.removeprefix(b"data: "))


def parse_strict(raw: bytes) -> Any:
    """Parse JSON without Python's extensions (NaN, Infinity), for which it raises ValueError."""
    return json.loads(raw, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


async def fuzz(
    url: str, requests: list[tuple[str, bytes]], at_once: int
) -> tuple[Counter[str], list[str]]:
    """Send all (path, body) requests, `at_once` at the same time. Return the counts by path and
    status, and the failures. At the end, wait until the server is idle and check its cells.
    """
    counts: Counter[str] = Counter()
    failures: list[str] = []
    numbers = iter(requests)
    # The time limit is long because a request of low priority waits for all others.
    async with httpx2.AsyncClient(base_url=url, timeout=1800) as client:

        async def worker() -> None:
            for path, body in numbers:
                try:
                    answer = await client.post(
                        path, content=body, headers={"content-type": "application/json"}
                    )
                except httpx2.HTTPError as error:
                    failures.append(f"{path} {_shortened(body)}: {error!r}")
                    continue
                counts[f"{path} {answer.status_code}"] += 1
                if problem := find_problem(path, answer.status_code, answer.content):
                    failures.append(f"{path} {_shortened(body)}: {problem}")

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return counts, failures + await wait_until_idle(client)


async def wait_until_idle(client: httpx2.AsyncClient) -> list[str]:
    """Wait until no request runs or waits and let the server check its cells. Return a message for
    each sequence that is still running, which is a leak.
    """
    while True:
        report = (await client.get("/v1/kv?check=true")).raise_for_status().json()
        if not report["running"] and not report["waiting"]:
            return [
                f"left behind: {sequence}"
                for sequence in report["sequences"]
                if sequence["state"] == "running"
            ]


def _shortened(body: bytes) -> str:
    return body.decode() if len(body) < 1500 else f"{body[:700].decode()} … {body[-700:].decode()}"


@contextmanager
def run_server(ref: str, flags: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Start `llmcli serve`. Yield its URL, and a list that gets the exit status after its end."""
    words = [
        sys.executable,
        "-m",
        "llmcli.app",
        "serve",
        ref,
        "-a",
        "tiny",
        "--port",
        "0",
        "--json",
    ]
    words += ["--max-tokens", "8", *flags]
    exit_status: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        if not {"--replicas", "--ray"} & set(flags):
            words += ["--files-folder", folder]
        yield from _run_server(words, exit_status)


def _run_server(words: Sequence[str], exit_status: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Start a server with this command line, and yield what run_server() yields."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], exit_status
        finally:
            process.terminate()
            exit_status.append(process.wait(60))


def print_result(counts: Counter[str], failures: list[str], code: int) -> int:
    """Print the counts and the failures; return 1 if there is a failure or the exit status `code`
    is not 0.
    """
    for label, count in sorted(counts.items()):
        print(f"{count:>7,}  {label}")
    for failure in failures[:50]:
        print(failure)
    print(f"{counts.total():,} requests, {len(failures)} answered wrongly; SIGTERM: exit {code}")
    return int(bool(failures or code))


def main() -> int:
    """Parse the flags, start the server, send and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    requests = cases()
    random.Random(args.seed).shuffle(requests)
    with run_server(args.ref, [word for word in flags if word != "--"]) as (url, exit_status):
        counts, failures = asyncio.run(fuzz(url, requests[: args.requests or None], args.at_once))
    return print_result(counts, failures, exit_status[0])


if __name__ == "__main__":
    raise SystemExit(main())
