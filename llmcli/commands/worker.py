"""`llmcli worker --rpc`: give this machine's devices to a model that runs elsewhere."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from llmcli.errors import UsageError, UserError

WHY = "it has no password and no encryption, and llama.cpp calls it insecure: who reaches the port runs code here"
LISTENS = 0.01  # seconds between two looks whether llama.cpp listens already
SCAN = 30.0  # seconds between two looks for connections that came


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
        typer.Option("--cache", metavar="DIR", help="Keep large tensors here: they travel once."),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Listen beyond this machine.")
    ] = False,
) -> None:
    """Let other machines put part of a model on this one's devices, until Ctrl-C or SIGTERM.

    It serves one client at a time. Both ends need the same version of llama.cpp.
    """
    from llmcli.hardware import cluster
    from llmcli.hardware import host as machine
    from llmcli.runtime.binding import devices, remote
    from llmcli.units import size

    if not rpc:
        raise UsageError("a worker of which kind?", hint="llmcli worker --rpc")
    if not cluster.loopback(host) and not allow_remote:
        raise UserError(
            f"--host {host} would be open to the network: {WHY}",
            hint="stay on 127.0.0.1 and come through ssh -L or WireGuard; or --allow-remote, in a network you trust",
        )
    _free(host, port)
    folder = _folder(cache) if cache else None
    names = remote.offered()
    out = sys.stdout
    for one in (one for one in devices.devices() if one.name in names):
        free = machine.available_memory() if one.kind == "cpu" else one.free
        room = "unknown" if free is None else size(free)
        out.write(f"{one.name}: {one.description} · {room} free of {size(one.total)}\n")
    out.flush()
    ours = os.dup(1)
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 1
    )  # llama.cpp prints two lines for every client there
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    endpoint = f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
    count = threads or machine.cores()
    serving = threading.Thread(
        target=remote.serve, args=(endpoint, names, count, folder), daemon=True
    )
    serving.start()
    try:
        while serving.is_alive() and cluster.gone([endpoint]):
            serving.join(LISTENS)
        if serving.is_alive():
            with os.fdopen(ours, "w", encoding="utf-8") as told:  # who reads this line can connect
                told.write(
                    f"worker at {host}:{port} · stop with Ctrl-C · elsewhere: llmcli chat --rpc {host}:{port}\n"
                )
        while serving.is_alive():
            serving.join(SCAN)
            remote.keep_alive()
    except KeyboardInterrupt:
        os._exit(130)  # the thread is in C, and ends with the process alone
    raise UserError(
        f"the worker at {host}:{port} ended by itself", hint="what it said stands above"
    )


def _free(host: str, port: int) -> None:
    """Raise UserError where the address cannot be had."""
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="--port takes another"
            ) from None


def _folder(path: Path) -> str:
    from llmcli.catalog.partial import make_folder

    path = path.expanduser().absolute()
    make_folder(path)
    return f"{path}/"
