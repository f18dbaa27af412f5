"""Runs the application in one process and its HTTP connections in another: ASGI messages are sent
as frames over a socket.

llama.cpp ends its process when a worker of `--rpc` is lost. With the model in its own process that
costs only the running answers; supervised_process.py is the other end of the socket and restarts
the process. A frame is a length and a marshalled tuple; both ends run the same version of the
program.
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

from llmcli.api.server_settings import Settings
from llmcli.serve.engine_thread.bridge import Bridge
from llmcli.serve.http.app import make_app
from quant.errors import Refusal

Frame = tuple[Any, ...]
# Opens the model in the other process; pickled by name.
Open = Callable[[], AbstractContextManager[tuple[Bridge, Settings]]]
HEAD = struct.Struct("<I")
BEAT = 1.0  # seconds between two heartbeats of the engine's thread
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
    """Encode a frame."""
    raw = marshal.dumps(frame)
    return HEAD.pack(len(raw)) + raw


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next frame, or None if the other end is closed."""
    try:
        (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
        frame: Frame = marshal.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None
    return frame


def read_now(link: socket.socket) -> Frame | None:
    """Return the next frame, or None if the other end is closed. Blocks."""
    try:
        head = _read_exactly(link, HEAD.size)
        frame: Frame | None = (
            marshal.loads(_read_exactly(link, HEAD.unpack(head)[0])) if head else None
        )
    except OSError:
        return None
    return frame


def portable(scope: Any) -> dict[str, Any]:
    """Return the part of a scope that the application needs, as plain values."""
    values = {name: scope[name] for name in SCOPE if name in scope}
    values["headers"] = [(bytes(name), bytes(value)) for name, value in scope.get("headers", ())]
    for name in ("client", "server"):
        values[name] = tuple(values[name]) if values.get(name) else None
    return values


def live(open_model: Open, link: socket.socket) -> None:
    """Run a model process: open the model, report that it is ready, and answer the requests that
    arrive over `link` until its other end is closed.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the front server handles Ctrl-C and SIGTERM
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
    beating = asyncio.create_task(_send_heartbeats(bridge, writer))
    # When the engine has died, closing the link makes the other end restart the process.
    beating.add_done_callback(lambda _: writer.close())
    try:
        while frame := await read(reader):
            kind, number, content = frame
            if kind == "open":
                queue: asyncio.Queue[Any] = asyncio.Queue()
                task = asyncio.create_task(_run_request(app, number, content, queue, writer))
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


async def _run_request(
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
    except Exception:  # noqa: BLE001 (a bug in one request must not end the others)
        sys.stderr.write(traceback.format_exc())
    finally:
        with suppress(OSError):
            writer.write(packed(("end", number, None)))


async def _send_heartbeats(bridge: Bridge, writer: Any) -> None:
    """Send heartbeats while the engine's thread still completes its steps."""
    while True:
        await bridge.call(lambda: None)
        writer.write(packed(("beat", 0, None)))
        await asyncio.sleep(BEAT)


def _read_exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = link.recv(size - len(data))
        if not chunk:
            return b""
        data += chunk
    return data
