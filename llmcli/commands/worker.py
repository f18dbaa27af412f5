"""`llmcli worker --rpc`: lends this machine's devices to a model on another machine."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from llmcli.errors import UsageError, UserError

INSECURE_REASON = (
    "it has no password and no encryption, and llama.cpp calls it insecure: "
    "whoever can connect can run code here"
)
LISTEN_POLL_SECONDS = 0.01  # seconds between two checks whether llama.cpp is listening
CONNECTION_SCAN_SECONDS = 30.0  # seconds between two scans for new connections


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("worker")(worker)


def worker(
    rpc: Annotated[bool, typer.Option("--rpc", help="Serve llama.cpp's RPC protocol.")] = False,
    host: Annotated[str, typer.Option("--host", help="Address to listen on (IPv4).")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("-p", "--port", min=1, max=65535, help="Port to listen on.")
    ] = 50052,
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", min=1, max=512, help="Threads; default: cores.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Cache large tensors here, sent only once."),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Also listen beyond this machine.")
    ] = False,
) -> None:
    """Lend this machine's devices to a model on another machine.

    A worker serves one client at a time, until Ctrl-C or SIGTERM. Both machines need the same
    version of llama.cpp.
    """
    from llmcli.hardware import rpc_workers
    from llmcli.hardware.host import available_memory, core_count
    from llmcli.runtime.binding.placement import devices
    from llmcli.runtime.binding.placement.rpc import (
        devices_to_offer,
        enable_keepalive,
        require_backend,
        serve_devices,
    )
    from llmcli.units import format_size

    if not rpc:
        raise UsageError("the kind of worker is missing", hint="llmcli worker --rpc")
    if not rpc_workers.is_loopback(host) and not allow_remote:
        raise UserError(
            f"--host {host} would be open to the network: {INSECURE_REASON}",
            hint="keep 127.0.0.1 and connect through ssh -L or WireGuard; "
            "or add --allow-remote in a trusted network",
        )
    folder = _cache_folder(cache) if cache else None
    require_backend()
    _require_free_port(host, port)
    names = devices_to_offer()
    out = sys.stdout
    for device in (device for device in devices.list_devices() if device.name in names):
        free = available_memory() if device.kind == "cpu" else device.free_bytes
        free_text = "unknown" if free is None else format_size(free)
        out.write(
            f"{device.name}: {device.description} · {free_text} free of {format_size(device.total_bytes)}\n"
        )
    out.flush()
    stdout_copy = os.dup(1)
    # discard stdout, because llama.cpp prints two lines to it for every client
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    endpoint = f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
    n_threads = threads or core_count()
    server_thread = threading.Thread(
        target=serve_devices, args=(endpoint, names, n_threads, folder), daemon=True
    )
    server_thread.start()
    try:
        while server_thread.is_alive() and rpc_workers.unreachable_workers([endpoint]):
            server_thread.join(LISTEN_POLL_SECONDS)
        if server_thread.is_alive():
            # printed when clients can connect
            with os.fdopen(stdout_copy, "w", encoding="utf-8") as stream:
                stream.write(
                    f"worker at {host}:{port} · Ctrl-C stops it · on the other machine: "
                    f"llmcli chat --rpc {host}:{port}\n"
                )
        while server_thread.is_alive():
            server_thread.join(CONNECTION_SCAN_SECONDS)
            enable_keepalive()
    except KeyboardInterrupt:
        os._exit(130)  # the server thread runs C code and ends only with the process
    raise UserError(
        f"the worker at {host}:{port} ended unexpectedly", hint="see its messages above"
    )


def _require_free_port(host: str, port: int) -> None:
    """Raise UserError if the worker cannot listen on this address."""
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="use another --port"
            ) from None


def _cache_folder(path: Path) -> str:
    from llmcli.atomic_files import make_folder

    path = path.absolute()
    make_folder(path)
    return f"{path}/"
