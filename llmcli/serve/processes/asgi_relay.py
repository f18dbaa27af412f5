"""Runs the application with the model in one process, and its HTTP connections in another process.
ASGI messages are sent between the processes as frames over a socket.

If a worker of `--rpc` is lost, llama.cpp aborts its process. With the model in a process of its
own, only the running answers are lost. supervised_process.py has the other end of the socket and
restarts the process. A frame is a length and a marshalled tuple; this is safe because both
processes run the same version of the program.
"""

import asyncio
import marshal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.types import ASGIApp

from llmcli.api.server_settings import ServerSettings
from llmcli.hardware import memory_limits
from llmcli.model_loader.earlier_load import EarlierLoad
from llmcli.model_loader.planned_memory import PlannedMemory
from llmcli.runtime.binding.placement.devices import HOST_DEVICE, limit_device_memory
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.engine_watch import EngineStuck
from llmcli.serve.http.app import make_app
from llmcli.serve.processes.interpreter import leave_stop_signals
from quant.errors import UserError

RelayFrame = tuple[Any, ...]
# Opens the model in the other process. It is pickled by name.
OpenModel = Callable[[], AbstractContextManager[tuple[EngineBridge, ServerSettings]]]
# opens a model that was planned
OpenPlanned = Callable[[EarlierLoad], AbstractContextManager[tuple[EngineBridge, ServerSettings]]]
LENGTH_PREFIX = struct.Struct("<I")
# What a process takes beside what the check of its memory counts: its libraries, and what requests
# take.
PLANNING_SLACK_BYTES = 128 << 20
HEARTBEAT_SECONDS = 1.0  # seconds between two heartbeats
SCOPE_KEYS = (
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


def encode_frame(frame: RelayFrame) -> bytes:
    """Return a frame as bytes: its length, then the marshalled tuple."""
    raw = marshal.dumps(frame)
    return LENGTH_PREFIX.pack(len(raw)) + raw


async def read_frame(reader: asyncio.StreamReader) -> RelayFrame | None:
    """Return the next frame, or None if the other process has closed the socket."""
    try:
        (size,) = LENGTH_PREFIX.unpack(await reader.readexactly(LENGTH_PREFIX.size))
        frame: RelayFrame = marshal.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None
    return frame


def read_frame_blocking(link: socket.socket) -> RelayFrame | None:
    """Wait for the next frame and return it; None if the other process has closed the socket."""
    try:
        head = _read_exactly(link, LENGTH_PREFIX.size)
        frame: RelayFrame | None = (
            marshal.loads(_read_exactly(link, LENGTH_PREFIX.unpack(head)[0])) if head else None
        )
    except OSError:
        return None
    return frame


def portable_scope(scope: Any) -> dict[str, Any]:
    """Return the fields of an ASGI scope that the application needs, as plain values that can be
    sent to another process.
    """
    values = {name: scope[name] for name in SCOPE_KEYS if name in scope}
    values["headers"] = [(bytes(name), bytes(value)) for name, value in scope.get("headers", ())]
    for name in ("client", "server"):
        values[name] = tuple(values[name]) if values.get(name) else None
    return values


def run_model_process(open_model: OpenModel, link: socket.socket) -> None:
    """The main function of a model process. It opens the model, reports this over `link`, and
    answers the requests that arrive over `link` until the other process closes it. If the model
    cannot be opened, it reports the error and exits.
    """
    leave_stop_signals()
    try:
        with open_model() as (bridge, settings):
            passes = bridge.runner.measured_passes
            facts = {
                "names": settings.names,
                "n_ctx": bridge.runner.n_ctx,
                "passes": asdict(passes) if passes else None,
            }
            link.sendall(encode_frame(("ready", facts)))
            asyncio.run(_serve(make_app(bridge, settings), bridge, link))
    except UserError as error:
        _exit_with_error(error, link)


def run_admitted_process(
    predict: Callable[[], dict[str, Any]],
    open_model: OpenPlanned,
    limits: Mapping[str, int],
    earlier: EarlierLoad | None,
    link: socket.socket,
) -> None:
    """The main function of a process of a server of several models. It reports over `link` what the
    model will take, waits until it is admitted, and goes on as run_model_process. `limits`: the most
    bytes that the model may take, by device; the admission has those of the host that it gets.
    `earlier`: what an earlier load with these limits has found; then nothing is predicted or
    reported.
    """
    leave_stop_signals()
    try:
        memory_limits.limit_own_memory(max(0, limits[HOST_DEVICE] - PLANNING_SLACK_BYTES))
        limit_device_memory(limits)
        if earlier is None:
            planned = predict()
            link.sendall(encode_frame(("planned", planned)))
            earlier = EarlierLoad(PlannedMemory(**planned))
    except UserError as error:
        _exit_with_error(error, link)
    admission = read_frame_blocking(link)
    if admission is None:
        return
    memory_limits.limit_own_memory(admission[1])
    run_model_process(partial(open_model, earlier), link)


def _exit_with_error(error: UserError, link: socket.socket) -> NoReturn:
    """Report an error at the start of the process, and exit."""
    with suppress(OSError):
        link.sendall(encode_frame(("failed", str(error), error.hint)))
    sys.exit(1)


async def _serve(app: Starlette, bridge: EngineBridge, link: socket.socket) -> None:
    """Answer requests until the other process closes the socket."""
    reader, writer = await asyncio.open_connection(sock=link)
    calls: dict[int, tuple[asyncio.Task[None], asyncio.Queue[Any]]] = {}
    batches = app.state.service.batches
    await batches.start()
    heartbeats = asyncio.create_task(_send_heartbeats(bridge, writer))
    # If the engine's thread has died or is stuck, the heartbeats end. Closing the link makes the
    # other process restart this one.
    heartbeats.add_done_callback(lambda _: writer.close())
    try:
        while frame := await read_frame(reader):
            kind, number, content = frame
            if kind == "open":
                queue: asyncio.Queue[Any] = asyncio.Queue()
                task = asyncio.create_task(_run_request(app, number, content, queue, writer))
                calls[number] = task, queue
                task.add_done_callback(partial(_forget, calls, number))
            elif number in calls:
                calls[number][1].put_nowait(content)
    finally:
        heartbeats.cancel()
        for task, _ in tuple(calls.values()):
            task.cancel()
        await batches.stop()
        batches.close()
        writer.close()


def _forget(calls: dict[int, Any], number: int, task: object) -> None:
    calls.pop(number, None)


async def _run_request(
    app: ASGIApp, number: int, scope: Any, queue: "asyncio.Queue[Any]", writer: Any
) -> None:
    """Run the application for one request. `number`: identifies the request in frames. `queue`: the
    ASGI messages for the application.
    """

    async def send(message: Any) -> None:
        if "headers" in message:
            message = {
                **message,
                "headers": [(bytes(name), bytes(value)) for name, value in message["headers"]],
            }
        writer.write(encode_frame(("out", number, message)))
        await writer.drain()

    try:
        await app(scope, queue.get, send)
    except Exception:  # noqa: BLE001 (a bug in one request must not end the others)
        sys.stderr.write(traceback.format_exc())
    finally:
        with suppress(OSError):
            writer.write(encode_frame(("end", number, None)))


async def _send_heartbeats(bridge: EngineBridge, writer: Any) -> None:
    """Send a heartbeat every second, also during a long pass, as long as the engine's thread is
    within its limits. If it is stuck, send the reason and return.
    """
    while True:
        try:
            bridge.check_responsive()
        except EngineStuck as error:
            writer.write(encode_frame(("stuck", 0, str(error))))
            return
        writer.write(encode_frame(("beat", 0, None)))
        await asyncio.sleep(HEARTBEAT_SECONDS)


def _read_exactly(link: socket.socket, size: int) -> bytes:
    """Return `size` bytes from the socket, or b"" if it was closed."""
    data = b""
    while len(data) < size:
        chunk = link.recv(size - len(data))
        if not chunk:
            return b""
        data += chunk
    return data
