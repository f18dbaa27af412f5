"""llama.cpp's RPC backend (ggml-rpc.h): the devices of other machines here, and this machine's
devices for them.

What it cannot do is said by whoever asks: it has no passwords and no time limits, and where a
worker is gone it aborts the process. `on_loss` is told of that last moment.
"""

import ctypes
import functools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding.devices import GPUS, HOST, devices
from llmcli.runtime.binding.library import ggml

MOST_WORKERS = 16  # GGML_RPC_MAX_SERVERS
# How soon a dead link is noticed: after 10 quiet seconds one question every 5, three unanswered
# ones are the end.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
SOURCE = "ggml-rpc"  # the file that llama.cpp's words about a lost worker begin with

_joined: dict[
    str, tuple[str, ...]
] = {}  # endpoint -> its devices' names; llama.cpp knows no way back
_kept: list[Any] = []  # callbacks that C holds


def join(endpoint: str) -> tuple[str, ...]:
    """Add the devices of the worker at "host:port"; their names. Again: the same ones, and nothing
    is done.

    Aborts where nobody answers: ask first (hardware/cluster.py). Raises UserError for a build
    without RPC.
    """
    if endpoint not in _joined:
        library = ggml()
        before = {one.name for one in devices()}
        added = _procedure("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(
            endpoint.encode()
        )
        if not added:
            raise UserError(
                f"the worker at {endpoint} has no devices",
                hint="look at what it says where it runs",
            )
        library.ggml_backend_register.argtypes = [ctypes.c_void_p]
        library.ggml_backend_register(added)
        _joined[endpoint] = tuple(one.name for one in devices() if one.name not in before)
    return _joined[endpoint]


def joined() -> dict[str, tuple[str, ...]]:
    """The workers of this process, and their devices' names."""
    return dict(_joined)


def offered() -> list[str]:
    """The devices that a worker gives to others, by name: the accelerators, or the CPU where there
    are none.
    """
    found = devices()
    return [one.name for one in found if one.kind in GPUS] or [
        one.name for one in found if one.name == HOST
    ]


def serve(endpoint: str, names: Sequence[str], threads: int, cache: str | None) -> None:
    """Let others compute on these devices; blocks for as long as the process lives, one client at a
    time.

    Returns where the address cannot be used. `cache`: a folder for large tensors, which then travel
    once.
    """
    library = ggml()
    library.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    library.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    given = (ctypes.c_void_p * len(names))(
        *(library.ggml_backend_dev_by_name(name.encode()) for name in names)
    )
    start = _procedure(
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    )
    start(endpoint.encode(), cache.encode() if cache else None, threads, len(names), given)


def on_loss(act: Callable[[], None]) -> None:
    """Call `act` where llama.cpp is about to abort because of a worker; where it returns, the
    process aborts.

    It comes from a thread of llama.cpp's own, while others wait for an answer that will not come.
    """

    def hear(message: bytes) -> None:
        if SOURCE in message.decode("utf-8", "replace"):
            act()

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(hear)
    _kept.append(callback)
    ggml().ggml_set_abort_callback(callback)


def keep_alive() -> None:
    """Let the connections of this process notice that the other end vanished without a word
    (Linux).

    llama.cpp's sockets wait for ever; the kernel's own probing ends them, and what waits gets an
    error.
    """
    try:
        numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return
    for number in numbers:
        try:
            link = socket.socket(fileno=number)
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if link.family == socket.AF_INET and link.type == socket.SOCK_STREAM:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in KEEPALIVE.items():
                    if hasattr(socket, name):
                        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError:
            pass
        finally:
            link.detach()


def _procedure(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the RPC backend; raises UserError for a build without it."""
    registry = _registry()
    found = registry and ggml().ggml_backend_reg_get_proc_address(registry, name.encode())
    if not found:
        raise UserError(
            "this build of llama.cpp has no RPC backend",
            hint="scripts/setup --again builds it with -DGGML_RPC=on",
        )
    return ctypes.CFUNCTYPE(result, *arguments)(found)


@functools.cache
def _registry() -> int | None:
    library = ggml()
    library.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    library.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    library.ggml_backend_reg_get_proc_address.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    found: int | None = library.ggml_backend_reg_by_name(b"RPC")
    return found
