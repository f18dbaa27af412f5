"""The transport of a server that is a program: one JSON message a line, on its standard input and
output.

The transport of the package `mcp` has no limit for the length of a line, so this module has its
own. A program gets few environment variables, its own process group, and ends with the connection.
"""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_REQUEST,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    jsonrpc_message_adapter,
)

from llmcli.tool_servers.limits import MAX_MESSAGE_BYTES
from llmcli.tool_servers.protocol.channel import INVALID_ANSWER, Channel, ChannelError
from llmcli.tool_servers.server_file import ToolServer

STDERR_BYTES = 2000  # of the end of standard error, for the reason of an exit
EXIT_SECONDS = 1.0  # for each step of ending a program
Streams = tuple[Any, Any]  # what mcp's dispatcher reads from, and writes to


@asynccontextmanager
async def open_program(server: ToolServer, channel: Channel) -> AsyncIterator[Streams]:
    """Start the program of `server`, and end it after the block. Yields the streams of messages.
    Raises OSError if the program cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        server.command,
        *server.args,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**get_default_environment(), **server.env},
        cwd=server.cwd or None,
        start_new_session=True,
        limit=MAX_MESSAGE_BYTES,
    )
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    stderr_tail = bytearray()
    tasks = [
        asyncio.create_task(coroutine)
        for coroutine in (
            _read_messages(process, channel, to_session, stderr_tail),
            _write_messages(process, from_session),
            _read_stderr(process, stderr_tail),
        )
    ]
    try:
        yield from_server, to_server
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (to_session, from_server, to_server, from_session):
            stream.close()


async def _read_messages(
    process: Process, channel: Channel, to_session: Any, stderr_tail: bytearray
) -> None:
    """Pass the messages of the program to the session until its output ends or breaks a limit."""
    assert process.stdout
    reason = ""
    try:
        while line := await process.stdout.readline():
            channel.count_bytes(len(line))
            if not line.strip():
                continue
            message = _parse_message(line)
            if message is None:
                channel.count_stray_line()
            else:
                await to_session.send(SessionMessage(message))
        reason = await _describe_exit(process, stderr_tail)
    except ChannelError as error:
        reason = str(error)
    except ValueError:  # of readline
        reason = f"it sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return
    channel.end(reason)
    to_session.close()


def _parse_message(line: bytes) -> JSONRPCMessage | None:
    """Return the message on a line, or None if there is none. An answer to a request that breaks
    the protocol becomes an error, which ends the request.
    """
    try:
        # Python's parser reads deeper nesting and half surrogate pairs, which are rejected later
        # for the tool that has them, and not for all.
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    try:
        return jsonrpc_message_adapter.validate_python(value, by_name=False)
    except (ValueError, RecursionError):
        request_id = value.get("id") if isinstance(value, dict) else None
        if type(request_id) not in (int, str) or "method" in value:
            return None
        error = ErrorData(code=INVALID_REQUEST, message=INVALID_ANSWER)
        return JSONRPCError(jsonrpc="2.0", id=request_id, error=error)


async def _write_messages(process: Process, from_session: Any) -> None:
    """Pass the messages of the session to the program. _read_messages notices if it has ended."""
    assert process.stdin
    with suppress(OSError, anyio.EndOfStream, anyio.ClosedResourceError):
        async for message in from_session:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()
    # messages to a program that has ended are discarded, so that no sender waits
    with suppress(anyio.EndOfStream, anyio.ClosedResourceError):
        async for _ in from_session:
            pass


async def _read_stderr(process: Process, tail: bytearray) -> None:
    """Read the program's standard error to its end, and keep its last bytes in `tail`."""
    assert process.stderr
    while piece := await process.stderr.read(1 << 16):
        tail += piece
        del tail[:-STDERR_BYTES]


async def _describe_exit(process: Process, stderr_tail: bytearray) -> str:
    """Return how a program ended whose output has ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(EXIT_SECONDS):
            await process.wait()
    lines = stderr_tail.decode("utf-8", "replace").strip().splitlines()
    last_line = f": {lines[-1]}" if lines else ""
    code = process.returncode
    if code is None:
        return f"it closed its standard output{last_line}"
    if code < 0:
        return f"it was ended by signal {-code}{last_line}"
    return f"it ended with exit code {code}{last_line}"


async def _stop(process: Process) -> None:
    """End a program: close its input, then SIGTERM, then SIGKILL, with a time for each. Also end
    what it has started in its process group.
    """
    assert process.stdin
    process.stdin.close()
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                await process.wait()
                break
        _signal_group(process.pid, signal_number)
    _signal_group(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(EXIT_SECONDS):
            await process.wait()
    # a process that left the group may still hold the pipes; asyncio has no public name for this
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
