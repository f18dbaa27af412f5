"""llama.cpp's RPC backend (ggml-rpc.h): this machine can use devices of other machines (workers),
and can offer its own devices.

The backend has no passwords and no timeouts. When a worker is lost it aborts the process; a
function set by `on_worker_loss` is called just before.
"""

import ctypes
import functools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding.devices import GPU_KINDS, HOST_DEVICE, list_devices
from llmcli.runtime.binding.library import ggml

MAX_WORKERS = 16  # GGML_RPC_MAX_SERVERS
# A dead connection is detected after 10 seconds of silence and three unanswered probes, 5 seconds
# apart. TCP_USER_TIMEOUT is in milliseconds.
KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}
RPC_SOURCE_FILE = "ggml-rpc"  # llama.cpp's messages about a lost worker begin with this file name

_joined: dict[
    str, tuple[str, ...]
    # the workers of this process: endpoint -> names of its devices; llama.cpp cannot remove a worker
] = {}
_kept: list[Any] = []  # callbacks that C has pointers to


def join_worker(endpoint: str) -> tuple[str, ...]:
    """Add the devices of the worker at "host:port" to llama.cpp and return their names. A worker
    that was added before is not added again.

    llama.cpp aborts if the worker does not answer, so check that first (hardware/rpc_workers.py).
    Raises UserError for a build without RPC, and for a worker without devices.
    """
    if endpoint not in _joined:
        library = ggml()
        before = {device.name for device in list_devices()}
        added = _procedure("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(
            endpoint.encode()
        )
        if not added:
            raise UserError(
                f"the worker at {endpoint} has no devices",
                hint="check the worker's output on its machine",
            )
        library.ggml_backend_register.argtypes = [ctypes.c_void_p]
        library.ggml_backend_register(added)
        _joined[endpoint] = tuple(
            device.name for device in list_devices() if device.name not in before
        )
    return _joined[endpoint]


def joined_workers() -> dict[str, tuple[str, ...]]:
    """Return the workers of this process and the names of their devices."""
    return dict(_joined)


def devices_to_offer() -> list[str]:
    """Return the names of the devices that a worker offers: the accelerators, or the CPU if there
    are none.
    """
    available = list_devices()
    return [device.name for device in available if device.kind in GPU_KINDS] or [
        device.name for device in available if device.name == HOST_DEVICE
    ]


def serve_devices(
    endpoint: str, names: Sequence[str], threads: int, cache_folder: str | None
) -> None:
    """Let other machines compute on these devices, one client at a time. The call normally blocks
    until the process ends.

    It returns only if the address cannot be used. `cache_folder`: a folder in which large tensors
    are stored, so that each is transferred only once.
    """
    library = ggml()
    library.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    library.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    handles = (ctypes.c_void_p * len(names))(
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
    start(
        endpoint.encode(),
        cache_folder.encode() if cache_folder else None,
        threads,
        len(names),
        handles,
    )


def on_worker_loss(act: Callable[[], None]) -> None:
    """Call `act` just before llama.cpp aborts the process because a worker is lost. The process
    ends when `act` returns.

    `act` runs on a thread of llama.cpp, while other threads wait for an answer of the worker that
    will never come.
    """

    def hear(message: bytes) -> None:
        if RPC_SOURCE_FILE in message.decode("utf-8", "replace"):
            act()

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(hear)
    _kept.append(callback)
    ggml().ggml_set_abort_callback(callback)


def enable_keepalive() -> None:
    """Make this process's connections detect that the other machine has vanished (Linux).

    llama.cpp's sockets would wait forever. The kernel's keepalive probes let them fail with an
    error.
    """
    try:
        descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            link = socket.socket(fileno=descriptor)
        except OSError:  # not a socket, or closed in the meantime
            continue
        try:
            if link.family == socket.AF_INET and link.type == socket.SOCK_STREAM:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in KEEPALIVE_OPTIONS.items():
                    if hasattr(socket, name):
                        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError:
            pass
        finally:
            link.detach()


def _procedure(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the RPC backend.

    Raises UserError for a build without it.
    """
    registry = _registry()
    procedure = registry and ggml().ggml_backend_reg_get_proc_address(registry, name.encode())
    if not procedure:
        raise UserError(
            "this build of llama.cpp has no RPC backend",
            hint="scripts/setup --again builds it with -DGGML_RPC=on",
        )
    return ctypes.CFUNCTYPE(result, *arguments)(procedure)


@functools.cache
def _registry() -> int | None:
    library = ggml()
    library.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    library.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    library.ggml_backend_reg_get_proc_address.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    registry: int | None = library.ggml_backend_reg_by_name(b"RPC")
    return registry
