"""RPC workers: processes on this or other machines, whose devices store and compute a part of a
model (llama.cpp's RPC backend).

If a worker does not answer, uses another protocol version or is lost, llama.cpp aborts. If a worker
is serving another client, llama.cpp waits forever. To prevent both, each worker is probed first, in
the same protocol and with a time limit.

Source: ggml-rpc.cpp.
"""

import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.errors import UserError
from llmcli.hardware.host import machine_identity as host_identity
from llmcli.runtime.binding import devices, rpc

DEFAULT_PORT = 50052  # default port of ggml-rpc-server
PROTOCOL_VERSION = (7, 0)  # RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION of ggml-rpc.h
TIMEOUT_SECONDS = 5.0  # a worker that does not answer within these seconds counts as busy
HELLO_COMMAND, DEVICE_COUNT_COMMAND, DEVICE_MEMORY_COMMAND = 14, 15, 11  # enum rpc_cmd
CAPABILITY_BYTES = 24  # bytes of a worker's capabilities; if all are zero, it uses plain TCP
MAX_DEVICES = 64  # a worker that reports more devices is invalid


@dataclass(frozen=True, slots=True)
class RpcWorker:
    """One RPC worker. `endpoint`: its host:port. `protocol`: its protocol version. `memory`: free
    and total bytes of each of its devices.
    """

    endpoint: str
    protocol: tuple[int, int, int]
    memory: tuple[tuple[int, int], ...]


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Parse the value of --rpc, "host:port,host:port". An address without a port gets DEFAULT_PORT.
    Raises UserError.
    """
    addresses = []
    for word in (part.strip() for part in text.split(",")):
        host, colon, port = word.partition(":")
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
        if not host or (colon and not 1 <= number <= 65535):
            raise UserError(
                f"--rpc: invalid worker address {word!r}",
                hint=f"--rpc HOST:{DEFAULT_PORT},HOST:{DEFAULT_PORT}",
            )
        addresses.append(f"{host}:{number or DEFAULT_PORT}")
    unique = tuple(dict.fromkeys(addresses))
    if len(unique) > rpc.MAX_WORKERS:
        raise UserError(
            f"--rpc names {len(unique)} workers",
            hint=f"llama.cpp takes up to {rpc.MAX_WORKERS}",
        )
    return unique


def add_workers(
    addresses: Sequence[str], proportions: Sequence[float] = ()
) -> tuple[RpcWorker, ...]:
    """Probe workers, and register their devices, so that models loaded by this process use them,
    too.

    `proportions`: the share of the model for each device; if empty, llama.cpp chooses shares by
    free memory. Raises UserError if a worker cannot be used; then no worker is registered.
    """
    workers = tuple(
        probe_worker(worker) for worker in addresses if worker not in rpc.joined_workers()
    )
    for worker in workers:
        rpc.join_worker(worker.endpoint)
    n_devices = (
        sum(worker.kind in devices.GPU_KINDS for worker in devices.list_devices())
        if proportions
        else 0
    )
    if len(proportions) > n_devices:
        raise UserError(
            f"--tensor-split has {len(proportions)} numbers for {n_devices} devices",
            hint="give one number for each worker's device in order, then one for each local GPU",
        )
    devices.set_tensor_split(proportions)
    return workers


def probe_worker(endpoint: str) -> RpcWorker:
    """Ask a worker for its version and its devices. Raises UserError if it cannot be used."""
    host, _, port = endpoint.rpartition(":")
    try:
        # like llama.cpp, which supports only IPv4 and uses the first address of a name
        address = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise UserError(
            f"{host} has no IPv4 address: {error.strerror}", hint="check the name after --rpc"
        ) from None
    try:
        with socket.create_connection(
            (str(address[0]), int(address[1])), timeout=TIMEOUT_SECONDS
        ) as link:
            return _ask(link, endpoint)
    except TimeoutError:
        raise UserError(
            f"the worker at {endpoint} did not answer within {TIMEOUT_SECONDS:.0f} seconds",
            hint="a worker serves one client at a time: end the other client, or start a worker on"
            " another port",
        ) from None
    except OSError as error:
        raise UserError(
            f"no worker at {endpoint}: {error.strerror or error}",
            hint=f"on that machine: llmcli worker --rpc --port {port}",
        ) from None


def unreachable_workers(addresses: Sequence[str]) -> list[str]:
    """Return the addresses at which no worker listens."""

    def listens(endpoint: str) -> bool:
        host, _, port = endpoint.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return True
        except OSError:
            return False

    return [address for address in addresses if not listens(address)]


def machine_and_workers() -> str:
    """Return a text that identifies this machine and the workers of its models. A saved measurement
    is valid only for the same text.
    """
    workers = rpc.joined_workers()
    return host_identity() + (f", workers {' '.join(workers)}" if workers else "")


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine. Raises UserError for an
    invalid IPv4 address.
    """
    try:
        return ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host).is_loopback
    except ValueError:
        raise UserError(
            f"--host {host!r} is not an IPv4 address",
            hint="--host 127.0.0.1, or 0.0.0.0 for all interfaces",
        ) from None


def _ask(link: socket.socket, endpoint: str) -> RpcWorker:
    not_a_worker = UserError(
        f"the program at {endpoint} is not a llama.cpp worker", hint="check the port"
    )
    try:
        answer = _call(link, HELLO_COMMAND, bytes(CAPABILITY_BYTES), 4 + CAPABILITY_BYTES)
    except EOFError:
        raise not_a_worker from None
    major, minor, patch = answer[0], answer[1], answer[2]
    if major != PROTOCOL_VERSION[0] or minor > PROTOCOL_VERSION[1]:
        raise UserError(
            f"the worker at {endpoint} uses protocol {major}.{minor}, this build"
            f" {PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]}",
            hint="use the same version of llmcli on both machines",
        )
    try:
        (count,) = struct.unpack("<I", _call(link, DEVICE_COUNT_COMMAND, b"", 4))
        if not 0 < count <= MAX_DEVICES:
            raise not_a_worker
        memory = [
            struct.unpack("<QQ", _call(link, DEVICE_MEMORY_COMMAND, struct.pack("<I", n), 16))
            for n in range(count)
        ]
    except EOFError:
        raise not_a_worker from None
    return RpcWorker(
        endpoint, (major, minor, patch), tuple((free, total) for free, total in memory)
    )


def _call(link: socket.socket, command: int, body: bytes, size: int) -> bytes:
    """Send a command to a worker, and return its answer, which must have `size` bytes. Raises
    EOFError for any other answer.
    """
    link.sendall(struct.pack("<BQ", command, len(body)) + body)
    (length,) = struct.unpack("<Q", _read(link, 8))
    if length != size:
        raise EOFError
    return _read(link, size)


def _read(link: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = link.recv(size - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return received
