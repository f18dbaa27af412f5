#!/usr/bin/env python3
"""Send wrong requests to a server over WebSocket and gRPC, and to its read-only HTTP paths.

usage: .venv/bin/python scripts/fuzz/websocket_grpc.py FILE.gguf [--requests 500] [--seed 0]
       [-- FLAGS of serve]

The requests are those of fuzz/http_requests.py. On the WebSocket each request is one message,
several in turn on one socket. Each must get an end or an error, and the socket must stay open. In
gRPC messages, the number fields get the unusual values that they can hold, the field `more` gets
the values of the HTTP requests, and some messages are random bytes. The status must name an error
of the caller, never of the server. Every read-only path is requested with every method and with
unusual query strings. The script prints the failures and exits with 1 if there are any.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx2

from scripts.fuzz.http_requests import (
    CHAT,
    TOOL,
    VALID,
    VALUES,
    cases,
    find_problem,
    print_result,
    run_server,
    wait_until_idle,
)
from scripts.load.server_process import free_port

NOT_OVER_WEBSOCKET = (
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/tokenize",
    "/detokenize",
    "/apply-template",
)
FORMS = {path for path, _ in VALID if not path.endswith("_tokens")} - set(NOT_OVER_WEBSOCKET)
READ_ONLY_PATHS = (
    "/",
    "/health",
    "/metrics",
    "/slots",
    "/props",
    "/v1/kv",
    "/v1/models",
    "/v1/models/x",
    "/v1/models/..%2f",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/v1/ws",
    "/v1",
    "/%00",
    "/%ff",
    "/v1/chat/completions",
    "/api/chat",
)
QUERIES = (
    "",
    "?",
    "?check=true",
    "?check=%00",
    "?check=true&check=1",
    "?" + "a" * 5000,
    "?%ff=%fe",
    "?=&=&",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "FROB")
MESSAGES = (
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"id": 1}',
    '{"id": ""}',
    '{"id": "a"}',
    '{"id": "a", "path": 1}',
    '{"id": "a", "cancel": 1}',
    '{"id": "a", "cancel": true}{',
    '{"id": "' + "a" * 5000 + '"}',
    "[" * 100_000,
    '{"id": "\\ud800", "path": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}',
    '{"id": 1e999}',
    '{"id": "a", "path": "/v1/completions", "body": 1}',
)
NUMBER_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
NUMBERS = (
    0,
    1,
    2**31,
    2**32 - 1,
    -1,
    0.5,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    2**64 - 1,
)
EXPECTED_STATUS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
PATIENCE = 120


async def send_over_websockets(
    url: str, requests: list[tuple[str, bytes]], at_once: int = 4
) -> tuple[Counter[str], list[str]]:
    """Send all requests over `at_once` WebSockets at the same time. Return the counts by outcome,
    and the failures.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    texts = [
        f'{{"id": "a", "path": "{path}", "body": {body.decode()}}}'
        for path, body in requests
        if path in FORMS
    ]
    texts_to_send, counts, failures = iter([*MESSAGES, *texts]), Counter[str](), list[str]()

    async def send_all(link: Any) -> bool:
        """Send messages on one socket until all are sent. Return False if the socket failed before
        that.
        """
        for text in texts_to_send:
            try:
                await link.send(text)
                counts[await _outcome(link)] += 1
            except (ConnectionClosed, TimeoutError, ValueError) as error:
                failures.append(f"socket: {text[:700]}: {error!r}")
                return False
        return True

    async def worker() -> None:
        all_sent = False
        while not all_sent:
            async with connect(f"{url.replace('http', 'ws', 1)}/v1/ws", max_size=None) as link:
                all_sent = await send_all(link)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return counts, failures


async def _outcome(link: Any) -> str:
    """Read the documents that answer a message. Return "socket done", or "socket" and the type of
    the error. Raises ValueError for an error of the server.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            document = json.loads(await link.recv())
            if document.get("done"):
                return "socket done"
            if error := document.get("error"):
                if not error["message"] or error["type"] in ("server_error", "unavailable_error"):
                    raise ValueError(error)
                return f"socket {error['type']}"


async def request_paths(url: str) -> tuple[Counter[str], list[str]]:
    """Request every read-only path with every method, and GET with every query. Return the counts
    by method and status, and the failures.
    """
    counts, failures = Counter[str](), list[str]()
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path in READ_ONLY_PATHS:
            for method in METHODS:
                for query in QUERIES if method == "GET" else QUERIES[:1]:
                    label = f"{method} {path}{query[:20]}"
                    answer = await client.request(method, path + query)
                    counts[f"{method} {answer.status_code}"] += 1
                    is_text = answer.status_code == 200 and not answer.content.startswith(
                        (b"{", b"[")
                    )
                    if (
                        method != "HEAD"
                        and not is_text
                        and (problem := find_problem(path, answer.status_code, answer.content))
                    ):
                        failures.append(f"{label}: {problem}")
    return counts, failures


def grpc_messages(rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield gRPC method names with serialized messages: unusual numbers in each number field, then
    `count` times an unusual value in `more`, an embedding request, and a random byte change.
    """
    from google.protobuf import json_format

    from llmcli.serve.grpc.service import message_classes

    classes = message_classes()
    valid = classes["GenerateRequest"](prompt="Once", max_tokens=2)
    for name in NUMBER_FIELDS:
        for number in NUMBERS:
            message = classes["GenerateRequest"](prompt="Once", max_tokens=2)
            with suppress(ValueError, TypeError):  # the field cannot hold this number
                setattr(message, name, number)
                yield "Generate", message.SerializeToString()
    for number in range(count):
        message = classes["GenerateRequest"](max_tokens=2)
        if number % 2:
            message.prompt = "Once"
        else:
            message.messages.add(role=rng.choice(("user", "", "tool", "x")), content="Look.")
        name, value = (
            rng.choice([*CHAT, "tools", "response_format", "json_schema", "grammar"]),
            rng.choice(VALUES),
        )
        if isinstance(value, float):
            message.more.fields[name].number_value = rng.choice(NUMBERS)
        else:
            with suppress(
                json_format.ParseError, ValueError, TypeError, OverflowError, RecursionError
            ):
                json_format.ParseDict(
                    {
                        name: value
                        if number % 3
                        else [{"type": "function", "function": TOOL}, value]
                    },
                    message.more,
                )
        yield "Generate", message.SerializeToString()
        embedding = classes["EmbedRequest"](
            texts=["", "a"][: number % 3], dimensions=number * 7919 % 2**32
        )
        yield "Embed", embedding.SerializeToString()
        raw = bytearray(valid.SerializeToString())
        raw[rng.randrange(len(raw))] = rng.randrange(256)
        yield rng.choice(("Generate", "Tokenize", "Embed", "Health")), bytes(raw)


async def send_over_grpc(
    port: int, messages: list[tuple[str, bytes]]
) -> tuple[Counter[str], list[str]]:
    """Send serialized messages over gRPC as raw bytes. Return the counts by method and status, and
    the failures.
    """
    import grpc

    from llmcli.serve.grpc.service import SERVICE_NAME

    counts, failures = Counter[str](), list[str]()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method, raw in messages:
            try:
                if method == "Generate":
                    async for _ in channel.unary_stream(f"/{SERVICE_NAME}/{method}")(
                        raw, timeout=PATIENCE
                    ):
                        pass
                else:
                    await channel.unary_unary(f"/{SERVICE_NAME}/{method}")(raw, timeout=PATIENCE)
                status, details = "OK", ""
            except grpc.aio.AioRpcError as error:
                status, details = error.code().name, str(error.details())
            counts[f"{method} {status}"] += 1
            if status not in EXPECTED_STATUS:
                failures.append(f"{method} {raw[:300]!r}: {status} {details}")
    return counts, failures


async def fuzz_all_interfaces(
    url: str, port: int | None, requests: list[tuple[str, bytes]], seed: int
) -> tuple[Counter[str], list[str]]:
    """Send wrong requests to WebSockets, read-only paths and, unless `port` is None, gRPC; then
    wait until the server is idle and check its cells. Return the counts and the failures.
    """
    counts, failures = await send_over_websockets(url, requests)
    results = [await request_paths(url)]
    if port is not None:
        results.append(
            await send_over_grpc(port, list(grpc_messages(random.Random(seed), len(requests) // 3)))
        )
    for more_counts, more_failures in results:
        counts, failures = counts + more_counts, failures + more_failures
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return counts, failures + await wait_until_idle(client)


def main() -> int:
    """Parse the flags, start the server, send and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    requests = cases()
    random.Random(args.seed).shuffle(requests)
    port = None
    with suppress(ImportError):
        import grpc  # noqa: F401

        port = free_port()
    grpc_flags = [] if port is None else ["--grpc-port", str(port)]
    with run_server(args.ref, [*grpc_flags, *(word for word in flags if word != "--")]) as (
        url,
        exit_status,
    ):
        counts, failures = asyncio.run(
            fuzz_all_interfaces(url, port, requests[: args.requests], args.seed)
        )
    return print_result(counts, failures, exit_status[0])


if __name__ == "__main__":
    raise SystemExit(main())
