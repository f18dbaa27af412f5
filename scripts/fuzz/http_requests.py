#!/usr/bin/env python3
"""Send requests with one error each: every field of a valid request with every kind of value.

usage: .venv/bin/python scripts/fuzz/http_requests.py FILE.gguf [--requests 0] [--at-once 8]
       [--seed 0] [-- FLAGS of serve]

The script starts its own server. The valid requests below have every field that their path accepts.
Each place in them, however deep, is set to every odd value (null, other types, huge, negative,
invalid JSON numbers, empty, nested, half surrogate pairs), removed, or duplicated. `--requests N`
takes N of these at random (0: all). An answer is right if it is 200 with a strict JSON document (or
a stream of them), or a 4xx with OpenAI's error object. A 500, a broken connection, a dead server,
or a wrong cell count when the server is idle are failures. The script prints the failures and exits
with 1 if there are any.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[2]
RAW = "\u2400"  # the rest of such a text is put into the body verbatim, without quotes
DEEP = 300
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
TOOL = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
# Values for any place. 1e999 is valid JSON, but no double.
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
    RAW + "[" * DEEP + "]" * DEEP,
    RAW + '{"a":' * DEEP + "0" + "}" * DEEP,
    RAW + "[" * 20_000 + "]" * 20_000,
]
GONE, TWICE = object(), object()
# The fields of an error object; Anthropic's and ollama's have fewer.
ERROR, THEIRS = (
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
SAID = [
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
    "messages": SAID,
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
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    (
        "/v1/chat/completions",
        {"messages": SAID[:1], "response_format": FORMAT, "max_tokens": 3, "stream": True},
    ),
    (
        "/v1/chat/completions",
        {"messages": SAID[:1], "json_schema": SCHEMA, "grammar": 'root ::= "a"', "max_tokens": 3},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": SAID[:1],
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
        "/v1/chat/completions/input_tokens",
        {"messages": SAID, "tools": [{"type": "function", "function": TOOL}]},
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
    ("/api/embed", {"input": ["Once", "upon"], "truncate": True, "dimensions": 8}),
    ("/api/embeddings", {"prompt": "Once", "model": "tiny"}),
    ("/api/show", {"model": "tiny", "verbose": True}),
    ("/apply-template", {"messages": SAID}),
    (
        "/v1/embeddings",
        {"input": ["Once", "upon"], "encoding_format": "float", "dimensions": 8, "model": None},
    ),
    (
        "/tokenize",
        {"content": "Once", "add_special": True, "parse_special": True, "with_pieces": True},
    ),
    ("/detokenize", {"tokens": [5, 6]}),
]
# A generating model can neither rank nor infill: refused, but only after all fields were read.
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
]


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of a document as tuples of keys."""
    if not isinstance(document, dict | list):
        return
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(document: Any, at: tuple[Any, ...], value: Any) -> bytes:
    """Return the document as JSON with another value at one place."""
    made = deepcopy(document)
    holder = made
    for key in at[:-1]:
        holder = holder[key]
    if value is GONE:
        del holder[at[-1]]
    elif value is TWICE:
        text = json.dumps(holder)
        return spelled(document).replace(
            text.encode(), f'{text[:-1]}, "{at[-1]}": "again"}}'.encode(), 1
        )
    else:
        holder[at[-1]] = value
    return spelled(made)


def spelled(document: Any) -> bytes:
    """Return JSON with raw parts verbatim."""
    parts = json.dumps(document).split(json.dumps(RAW)[:-1])
    return (parts[0] + "".join(part.replace('"', "", 1) for part in parts[1:])).encode()


def cases() -> list[tuple[str, bytes]]:
    """Return all requests."""
    found = []
    for path, body in GOOD + REFUSED:
        for at in places(body):
            odd = [GONE, *VALUES] if isinstance(at[-1], int) else [GONE, TWICE, *VALUES]
            found += [(path, changed(body, at, value)) for value in odd]
    return found


def wrong(path: str, status: int, raw: bytes) -> str:
    """Return what is wrong with an answer, or ""."""
    try:
        if status == 200:
            for document in answered(raw):
                if isinstance(document, dict) and document.get("error"):
                    return f"a stream ended with {document['error']}"
            return ""
        about = strict(raw)["error"]
        fields = next((fields for begin, fields in THEIRS.items() if path.startswith(begin)), ERROR)
        about = {"message": about} if isinstance(about, str) else about
        if (
            (not 400 <= status < 500 and status != 501)
            or not about["message"]
            or not set(about) >= fields
        ):
            return f"{status} {about}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{status} with {raw[:200]!r}: {error}"
    return ""


def answered(raw: bytes) -> Iterator[Any]:
    """Yield the document of an answer, or each document of a stream."""
    if not raw.startswith((b"data:", b"event:", b":")):
        yield from map(strict, raw.splitlines() if raw.startswith(b"{") else [raw])
        return
    for line in raw.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield strict(line.removeprefix(b"data: "))


def strict(raw: bytes) -> Any:
    """Parse JSON without Python's extensions. Raises ValueError."""
    return json.loads(raw, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


async def fuzz(
    url: str, asked: list[tuple[str, bytes]], at_once: int
) -> tuple[Counter[str], list[str]]:
    """Send all requests; return the counts by status and the failures. Checks the cells at the end."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    numbers = iter(asked)
    # A request of low priority waits as long as there are others.
    async with httpx2.AsyncClient(base_url=url, timeout=1800) as client:

        async def worker() -> None:
            for path, body in numbers:
                try:
                    answer = await client.post(
                        path, content=body, headers={"content-type": "application/json"}
                    )
                except httpx2.HTTPError as error:
                    found.append(f"{path} {_short(body)}: {error!r}")
                    continue
                counts[f"{path} {answer.status_code}"] += 1
                if what := wrong(path, answer.status_code, answer.content):
                    found.append(f"{path} {_short(body)}: {what}")

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return counts, found + await idle(client)


async def idle(client: httpx2.AsyncClient) -> list[str]:
    """Wait until nothing runs or waits, check the cells, and return what was left behind."""
    while True:
        report = (await client.get("/v1/kv?check=true")).raise_for_status().json()
        if not report["running"] and not report["waiting"]:
            return [
                f"left behind: {one}" for one in report["sequences"] if one["state"] == "running"
            ]


def _short(body: bytes) -> str:
    return body.decode() if len(body) < 1500 else f"{body[:700].decode()} … {body[-700:].decode()}"


@contextmanager
def served(ref: str, flags: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Start a server; yield its address and a list that gets its exit status."""
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
    ended: list[int] = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], ended
        finally:
            process.terminate()
            ended.append(process.wait(60))


def told(counts: Counter[str], found: list[str], code: int) -> int:
    """Print the result; return 1 if anything is wrong."""
    for words, count in sorted(counts.items()):
        print(f"{count:>7,}  {words}")
    for what in found[:50]:
        print(what)
    print(f"{counts.total():,} requests, {len(found)} answered wrongly; SIGTERM: exit {code}")
    return int(bool(found or code))


def main() -> int:
    """Serve, send and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked, flags = parser.parse_known_args()
    wanted = cases()
    random.Random(asked.seed).shuffle(wanted)
    with served(asked.ref, [word for word in flags if word != "--"]) as (url, ended):
        counts, found = asyncio.run(fuzz(url, wanted[: asked.requests or None], asked.at_once))
    return told(counts, found, ended[0])


if __name__ == "__main__":
    raise SystemExit(main())
