#!/usr/bin/env python3
"""Send wrong requests over the WebSocket, gRPC, and to the read-only paths of a server.

usage: .venv/bin/python scripts/fuzz/websocket_grpc.py FILE.gguf [--requests 500] [--seed 0]
       [-- FLAGS of serve]

The cases are those of fuzz/http_requests.py. Over the WebSocket each is one message, several in
turn on one socket: each must get an end or an error, and the socket must stay open. Over gRPC a
request's fields get the odd values that a message can carry, its `more` those of the HTTP form, and
some requests are random bytes: the status must blame the caller, never the server. Every path is
requested with every method and odd query strings. The script prints the failures and exits with 1
if there are any.
"""

import argparse
import asyncio
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx2

from scripts.fuzz.http_requests import CHAT, GOOD, TOOL, VALUES, cases, idle, served, told, wrong

NO_FORMS = (
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/tokenize",
    "/detokenize",
    "/apply-template",
)
FORMS = {path for path, _ in GOOD if not path.endswith("_tokens")} - set(NO_FORMS)
READ = (
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
PLAIN = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
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
RIGHT = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
PATIENCE = 120


async def sockets(
    url: str, asked: list[tuple[str, bytes]], at_once: int = 4
) -> tuple[Counter[str], list[str]]:
    """Send over `at_once` WebSockets; return counts by outcome, and the failures."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    texts = [
        f'{{"id": "a", "path": "{path}", "body": {body.decode()}}}'
        for path, body in asked
        if path in FORMS
    ]
    numbers, counts, found = iter([*MESSAGES, *texts]), Counter[str](), list[str]()

    async def talked(link: Any) -> bool:
        """Return whether all messages were sent on this socket; else it is unusable."""
        for text in numbers:
            try:
                await link.send(text)
                counts[await _ended(link)] += 1
            except (ConnectionClosed, TimeoutError, ValueError) as error:
                found.append(f"socket: {text[:700]}: {error!r}")
                return False
        return True

    async def worker() -> None:
        over = False
        while not over:
            async with connect(f"{url.replace('http', 'ws', 1)}/v1/ws", max_size=None) as link:
                over = await talked(link)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return counts, found


async def _ended(link: Any) -> str:
    """Return "done", or the status of the error that answered a message."""
    async with asyncio.timeout(PATIENCE):
        while True:
            document = json.loads(await link.recv())
            if document.get("done"):
                return "socket done"
            if error := document.get("error"):
                if not error["message"] or error["type"] in ("server_error", "unavailable_error"):
                    raise ValueError(error)
                return f"socket {error['type']}"


async def reads(url: str) -> tuple[Counter[str], list[str]]:
    """Request every path with every method."""
    counts, found = Counter[str](), list[str]()
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path in READ:
            for method in METHODS:
                for query in QUERIES if method == "GET" else QUERIES[:1]:
                    where = f"{method} {path}{query[:20]}"
                    answer = await client.request(method, path + query)
                    counts[f"{method} {answer.status_code}"] += 1
                    plain = answer.status_code == 200 and not answer.content.startswith(
                        (b"{", b"[")
                    )
                    if (
                        method != "HEAD"
                        and not plain
                        and (what := wrong(path, answer.status_code, answer.content))
                    ):
                        found.append(f"{where}: {what}")
    return counts, found


def messages(dice: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield methods and serialized requests: odd fields, odd `more`, and random byte changes."""
    from google.protobuf import json_format

    from llmcli.serve.grpc.service import message_classes

    kind = message_classes()
    good = kind["GenerateRequest"](prompt="Once", max_tokens=2)
    for name in PLAIN:
        for number in NUMBERS:
            made = kind["GenerateRequest"](prompt="Once", max_tokens=2)
            with suppress(ValueError, TypeError):  # a message cannot carry it
                setattr(made, name, number)
                yield "Generate", made.SerializeToString()
    for number in range(count):
        made = kind["GenerateRequest"](max_tokens=2)
        if number % 2:
            made.prompt = "Once"
        else:
            made.messages.add(role=dice.choice(("user", "", "tool", "x")), content="Look.")
        name, value = (
            dice.choice([*CHAT, "tools", "response_format", "json_schema", "grammar"]),
            dice.choice(VALUES),
        )
        if isinstance(value, float):
            made.more.fields[name].number_value = dice.choice(NUMBERS)
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
                    made.more,
                )
        yield "Generate", made.SerializeToString()
        many = kind["EmbedRequest"](texts=["", "a"][: number % 3], dimensions=number * 7919 % 2**32)
        yield "Embed", many.SerializeToString()
        raw = bytearray(good.SerializeToString())
        raw[dice.randrange(len(raw))] = dice.randrange(256)
        yield dice.choice(("Generate", "Tokenize", "Embed", "Health")), bytes(raw)


async def calls(port: int, asked: list[tuple[str, bytes]]) -> tuple[Counter[str], list[str]]:
    """Send over gRPC, with raw bytes in both directions."""
    import grpc

    from llmcli.serve.grpc.service import SERVICE_NAME

    counts, found = Counter[str](), list[str]()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method, raw in asked:
            try:
                if method == "Generate":
                    async for _ in channel.unary_stream(f"/{SERVICE_NAME}/{method}")(
                        raw, timeout=PATIENCE
                    ):
                        pass
                else:
                    await channel.unary_unary(f"/{SERVICE_NAME}/{method}")(raw, timeout=PATIENCE)
                status, words = "OK", ""
            except grpc.aio.AioRpcError as error:
                status, words = error.code().name, str(error.details())
            counts[f"{method} {status}"] += 1
            if status not in RIGHT:
                found.append(f"{method} {raw[:300]!r}: {status} {words}")
    return counts, found


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
        return port


async def all_doors(
    url: str, port: int | None, wanted: list[tuple[str, bytes]], seed: int
) -> tuple[Counter[str], list[str]]:
    """Test sockets, paths and, if it is served, gRPC; then check the cells."""
    counts, found = await sockets(url, wanted)
    parts = [await reads(url)]
    if port is not None:
        parts.append(await calls(port, list(messages(random.Random(seed), len(wanted) // 3))))
    for more, wrongs in parts:
        counts, found = counts + more, found + wrongs
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return counts, found + await idle(client)


def main() -> int:
    """Serve, send and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked, flags = parser.parse_known_args()
    wanted = cases()
    random.Random(asked.seed).shuffle(wanted)
    port = None
    with suppress(ImportError):
        import grpc  # noqa: F401

        port = free_port()
    more = [] if port is None else ["--grpc-port", str(port)]
    with served(asked.ref, [*more, *(word for word in flags if word != "--")]) as (url, ended):
        counts, found = asyncio.run(all_doors(url, port, wanted[: asked.requests], asked.seed))
    return told(counts, found, ended[0])


if __name__ == "__main__":
    raise SystemExit(main())
