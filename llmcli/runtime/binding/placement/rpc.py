"""llama.cpp's RPC backend (ggml-rpc.h). With it, this machine can use devices of other machines
(workers), or be a worker that offers its own devices.

The backend has no passwords and no timeouts. When the connection to a worker is lost, it aborts the
process; `on_worker_loss` sets a function that is called just before.
"""

import ctypes
import functools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding import contract
from llmcli.runtime.binding.library import ggml, is_loaded, registry_lock
from llmcli.runtime.binding.placement.devices import (
    GPU_KINDS,
    HOST_DEVICE,
    find_device,
    list_devices,
    rpc_devices,
)
from quant.installation import install_llama_command

MAX_WORKERS = contract.HEADER_NUMBERS["GGML_RPC_MAX_SERVERS"]
# A dead connection is detected after 10 seconds of silence and three unanswered probes, 5 seconds
# apart. TCP_USER_TIMEOUT is in milliseconds.
KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}
RPC_SOURCE_FILE = "ggml-rpc"  # llama.cpp's messages about a lost worker begin with this file name

_callbacks: list[Any] = []  # callbacks that C has pointers to


def join_worker(endpoint: str) -> tuple[str, ...]:
    """Add the devices of the worker at `endpoint` ("host:port") to those of llama.cpp, and return
    their names. Devices of a worker that was added before are not added again.

    llama.cpp aborts if the worker does not answer, so the caller must check that first
    (hardware/rpc_workers.py). Raises UserError for a build without RPC, and for a worker without
    devices.
    """
    with registry_lock:
        if endpoint not in joined_workers():
            library = ggml()
            added = _procedure(contract.RPC_ADD_SERVER, ctypes.c_void_p, ctypes.c_char_p)(
                endpoint.encode()
            )
            if not added:
                raise UserError(
                    f"the worker at {endpoint} has no devices",
                    hint="check the worker's output on its machine",
                )
            library.ggml_backend_register.argtypes = [ctypes.c_void_p]
            library.ggml_backend_register(added)
        return joined_workers()[endpoint]


def joined_workers() -> dict[str, tuple[str, ...]]:
    """Return the workers that this process uses, as a dictionary from "host:port" to the names of
    the worker's devices. llama.cpp has this list, and cannot remove a worker from it.
    """
    return rpc_devices() if is_loaded() else {}


def print_protocol_version() -> None:
    """Let llama.cpp print the version of the protocol that it uses with workers on stdout. It goes
    through C's buffer, which is written when the process ends.

    llama.cpp has no function for the version, but prints it before it opens the address of a
    worker. The address is invalid here, so the call returns.
    """
    serve_devices("", [HOST_DEVICE], 1, None)


def devices_to_offer() -> list[str]:
    """Return the names of the devices that this machine offers as a worker: its GPUs, or the CPU if
    it has none.
    """
    available = list_devices()
    return [device.name for device in available if device.kind in GPU_KINDS] or [
        device.name for device in available if device.name == HOST_DEVICE
    ]


def serve_devices(
    endpoint: str, names: Sequence[str], threads: int, cache_folder: str | None
) -> None:
    """Run a worker at `endpoint` ("host:port") that lets other machines compute on the devices
    `names`. It serves one client at a time. The call blocks until the process ends, and returns
    only if the address cannot be used.

    `threads`: threads of the CPU device. `cache_folder`: a folder in which large tensors are
    stored, so that each is transferred only once; None for no such folder.
    """
    handles = (ctypes.c_void_p * len(names))(*map(find_device, names))
    start = _procedure(
        contract.RPC_START_SERVER,
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    )
    start(
        endpoint.encode(),
        cache_folder.encode() if cache_folder else None,
        threads,
        len(names),
        handles,
    )


def on_worker_loss(act: Callable[[], None]) -> None:
    """Set a function that is called just before llama.cpp aborts the process because a worker is
    lost. The process ends when `act` returns.

    `act` runs on a thread of llama.cpp, while other threads wait for an answer that the worker will
    never send.
    """

    def on_abort(message: bytes) -> None:
        """Call `act` if llama.cpp's abort message names the source file of the RPC backend."""
        if RPC_SOURCE_FILE in message.decode("utf-8", "replace"):
            act()

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(on_abort)
    _callbacks.append(callback)
    ggml().ggml_set_abort_callback(callback)


def enable_keepalive() -> None:
    """Turn on TCP keepalive for all IPv4 connections of this process. On Linux, a connection then
    fails with an error soon after the other machine has vanished. Without it, llama.cpp's sockets
    would wait forever.
    """
    try:
        descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:  # not a socket, or closed in the meantime
            continue
        try:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in KEEPALIVE_OPTIONS.items():
                    if hasattr(socket, name):
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError:
            pass
        finally:
            connection.detach()


def require_backend() -> None:
    """Raise UserError for a build of llama.cpp without the RPC backend."""
    _procedure(contract.RPC_START_SERVER, None)


def _procedure(symbol: contract.OptionalSymbol, result: Any, *arguments: Any) -> Any:
    """Return a C function of the RPC backend. `result` and `arguments`: its ctypes types.

    Raises UserError for a build of llama.cpp without the backend.
    """
    registry = _registry()
    procedure = registry and ggml().ggml_backend_reg_get_proc_address(
        registry, symbol.name.encode()
    )
    if not procedure:
        raise UserError(
            "this build of llama.cpp has no RPC backend",
            hint=f"build llama.cpp with it: {install_llama_command('-DGGML_RPC=on')}",
        )
    return ctypes.CFUNCTYPE(result, *arguments)(procedure)


@functools.cache
def _registry() -> int | None:
    """Return the address of the RPC backend's registry, or None for a build without the backend."""
    library = ggml()
    library.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    library.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    library.ggml_backend_reg_get_proc_address.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    with registry_lock:
        registry: int | None = library.ggml_backend_reg_by_name(b"RPC")
    return registry


def is_built() -> bool:
    """Return whether this build of llama.cpp has the backend."""
    return _registry() is not None
