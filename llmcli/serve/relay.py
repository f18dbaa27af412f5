"""The application in one process, its HTTP connections in another: ASGI messages as frames over a
socket.

llama.cpp ends its process where a worker of `--rpc` is lost. With the model in a process of its own
that is one more answer that failed: child.py holds this end's other side, and starts another. A
frame is a length and a marshalled tuple; both ends are the same program.
"""

import asyncio
import marshal
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from llmcli.serve.app import make_app
from llmcli.serve.bridge import Bridge
from llmcli.serve.settings import Settings
from quant.errors import Refusal

Frame = tuple[Any, ...]
# What opens the model in the other process: it travels there by name.
Open = Callable[[], AbstractContextManager[tuple[Bridge, Settings]]]
HEAD = struct.Struct("<I")
BEAT = 1.0  # seconds between two signs of life of the engine's thread
SCOPE = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)


def packed(frame: Frame) -> bytes:
    """A frame as bytes."""
    raw = marshal.dumps(frame)
    return HEAD.pack(len(raw)) + raw


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame, None where the other end is gone."""
    try:
        (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
        found: Frame = marshal.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None
    return found


def read_now(link: socket.socket) -> Frame | None:
    """The same, waiting."""
    try:
        head = _exactly(link, HEAD.size)
        found: Frame | None = marshal.loads(_exactly(link, HEAD.unpack(head)[0])) if head else None
    except OSError:
        return None
    return found


def portable(scope: Any) -> dict[str, Any]:
    """What of a scope the application needs, as values that travel."""
    kept = {name: scope[name] for name in SCOPE if name in scope}
    kept["headers"] = [(bytes(name), bytes(value)) for name, value in scope.get("headers", ())]
    for name in ("client", "server"):
        kept[name] = tuple(kept[name]) if kept.get(name) else None
    return kept


def live(open_model: Open, link: socket.socket) -> None:
    """A whole process: open the model, tell so, answer what comes over `link` until its other end
    is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is the front's to act on
        signal.signal(number, signal.SIG_IGN)
    try:
        with open_model() as (bridge, settings):
            facts = {"names": settings.names, "n_ctx": bridge.runner.n_ctx}
            link.sendall(packed(("ready", facts)))
            asyncio.run(_serve(make_app(bridge, settings), bridge, link))
    except Refusal as error:
        with suppress(OSError):
            link.sendall(packed(("failed", str(error), error.hint)))
        sys.exit(1)


async def _serve(app: ASGIApp, bridge: Bridge, link: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    calls: dict[int, tuple[asyncio.Task[None], asyncio.Queue[Any]]] = {}
    beating = asyncio.create_task(_beat(bridge, writer))
    beating.add_done_callback(
        lambda _: writer.close()
    )  # an engine that has died: the other end starts another
    try:
        while frame := await read(reader):
            kind, number, content = frame
            if kind == "open":
                queue: asyncio.Queue[Any] = asyncio.Queue()
                task = asyncio.create_task(_call(app, number, content, queue, writer))
                calls[number] = task, queue
                task.add_done_callback(partial(_forget, calls, number))
            elif number in calls:
                calls[number][1].put_nowait(content)
    finally:
        beating.cancel()
        for task, _ in tuple(calls.values()):
            task.cancel()
        writer.close()


def _forget(calls: dict[int, Any], number: int, task: object) -> None:
    calls.pop(number, None)


async def _call(
    app: ASGIApp, number: int, scope: Any, queue: "asyncio.Queue[Any]", writer: Any
) -> None:
    async def send(message: Any) -> None:
        if "headers" in message:
            message = {
                **message,
                "headers": [(bytes(name), bytes(value)) for name, value in message["headers"]],
            }
        writer.write(packed(("out", number, message)))
        await writer.drain()

    try:
        await app(scope, queue.get, send)
    except Exception:  # noqa: BLE001 (a bug of ours in one request, as uvicorn would tell it; the others go on)
        sys.stderr.write(traceback.format_exc())
    finally:
        with suppress(OSError):
            writer.write(packed(("end", number, None)))


async def _beat(bridge: Bridge, writer: Any) -> None:
    """Tell that the engine's thread still gets from step to step."""
    while True:
        await bridge.call(lambda: None)
        writer.write(packed(("beat", 0, None)))
        await asyncio.sleep(BEAT)


def _exactly(link: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = link.recv(size - len(found))
        if not more:
            return b""
        found += more
    return found
