"""Find and check RPC workers: processes on this or other machines whose devices store and compute a
part of a model (llama.cpp's RPC backend).

llama.cpp aborts the process if a worker does not answer, uses another protocol version or is lost.
It waits forever for a worker that serves another client. So each worker is first probed here, in
the same protocol and with a time limit.

Source: ggml-rpc.cpp.
"""

import functools
import ipaddress
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llmcli
from llmcli.errors import UserError
from llmcli.hardware.host import machine_identity as host_identity
from llmcli.runtime.binding import contract
from llmcli.runtime.binding.placement import rpc

DEFAULT_PORT = 50052  # default port of ggml-rpc-server
TIMEOUT_SECONDS = 5.0  # a worker that does not answer in this time counts as busy
HELLO_COMMAND, DEVICE_COUNT_COMMAND, DEVICE_MEMORY_COMMAND = (
    contract.HEADER_NUMBERS[f"RPC_CMD_{name}"]
    for name in ("HELLO", "DEVICE_COUNT", "GET_DEVICE_MEMORY")
)
CAPABILITY_BYTES = 24  # length of the capabilities in the hello command; all zero for plain TCP
# prints the version of llama.cpp's protocol
VERSION_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from llmcli.runtime.binding import library; "
    "from llmcli.runtime.binding.placement import rpc; library.load_alone(); "
    "rpc.print_protocol_version()"
)
VERSION_LINE = re.compile(r"Starting RPC server v(\d+)\.(\d+)\.(\d+)")
VERSION_SECONDS = 60.0  # time for the child process that prints the version
MAX_DEVICES = 64  # an answer with more devices is not from a worker


@dataclass(frozen=True, slots=True)
class RpcWorker:
    """An RPC worker that has answered."""

    endpoint: str  # host:port
    protocol: tuple[int, int, int]  # major, minor and patch version of its protocol
    memory: tuple[tuple[int, int], ...]  # free and total bytes of each of its devices


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return the addresses in the value of --rpc, "host:port,host:port", each once. An address
    without a port gets DEFAULT_PORT. Raises UserError for an invalid address.
    """
    addresses = []
    for word in (address.strip() for address in text.split(",")):
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


def add_workers(addresses: Sequence[str]) -> tuple[RpcWorker, ...]:
    """Probe the workers at `addresses` and register their devices with llama.cpp, so that models
    that this process loads also use them. Return the workers that were not registered before.

    Raises UserError if a worker cannot be used; then none is registered.
    """
    workers = tuple(
        probe_worker(worker) for worker in addresses if worker not in rpc.joined_workers()
    )
    for worker in workers:
        rpc.join_worker(worker.endpoint)
    return workers


def probe_worker(endpoint: str) -> RpcWorker:
    """Ask the worker at `endpoint` (host:port) for its protocol version and its devices. Raises
    UserError if it does not answer or has another version.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        # llama.cpp also supports only IPv4 and uses the first address of a name
        address = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise UserError(
            f"{host} has no IPv4 address: {error.strerror}", hint="check the name after --rpc"
        ) from None
    try:
        with socket.create_connection(
            (str(address[0]), int(address[1])), timeout=TIMEOUT_SECONDS
        ) as connection:
            return _query_worker(connection, endpoint)
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


@functools.cache
def protocol_version() -> tuple[int, int, int]:
    """Return the version of the protocol that this build of llama.cpp uses with its workers, as
    (major, minor, patch). A child process prints it.

    Raises UserError for a build without RPC, and if the version is not printed.
    """
    rpc.require_backend()
    program = [sys.executable, "-P", "-c", VERSION_PROGRAM, str(Path(llmcli.__path__[0]).parent)]
    try:
        output = subprocess.run(
            program, capture_output=True, timeout=VERSION_SECONDS, text=True, errors="replace"
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    found = VERSION_LINE.search(output)
    if found is None:
        raise contract.version_error("it does not print the protocol of its workers")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def unreachable_workers(addresses: Sequence[str]) -> list[str]:
    """Return those of the addresses (host:port) that accept no TCP connection."""

    def listens(endpoint: str) -> bool:
        host, _, port = endpoint.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return True
        except OSError:
            return False

    return [address for address in addresses if not listens(address)]


def machine_and_workers() -> str:
    """Return a text that identifies this machine and the RPC workers that this process has
    registered. A saved measurement is valid only for the same text.
    """
    workers = rpc.joined_workers()
    return host_identity() + (f", workers {' '.join(workers)}" if workers else "")


def is_loopback(host: str) -> bool:
    """Return whether `host`, an IPv4 address or "localhost", can be reached only from this machine.
    Raises UserError for any other text.
    """
    try:
        return ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host).is_loopback
    except ValueError:
        raise UserError(
            f"--host {host!r} is not an IPv4 address",
            hint="--host 127.0.0.1, or 0.0.0.0 for all interfaces",
        ) from None


def _query_worker(connection: socket.socket, endpoint: str) -> RpcWorker:
    """Return the worker on an open connection. Raises UserError if the program there is not a
    worker or uses another protocol version.
    """
    not_a_worker = UserError(
        f"the program at {endpoint} is not a llama.cpp worker", hint="check the port"
    )
    try:
        answer = _send_command(
            connection, HELLO_COMMAND, bytes(CAPABILITY_BYTES), 4 + CAPABILITY_BYTES
        )
    except EOFError:
        raise not_a_worker from None
    major, minor, patch = answer[0], answer[1], answer[2]
    own_major, own_minor, _ = protocol_version()
    if major != own_major or minor > own_minor:
        raise UserError(
            f"the worker at {endpoint} uses protocol {major}.{minor}, this build"
            f" {own_major}.{own_minor}",
            hint="use the same version of llmcli on both machines",
        )
    try:
        (count,) = struct.unpack("<I", _send_command(connection, DEVICE_COUNT_COMMAND, b"", 4))
        if not 0 < count <= MAX_DEVICES:
            raise not_a_worker
        memory = [
            struct.unpack(
                "<QQ", _send_command(connection, DEVICE_MEMORY_COMMAND, struct.pack("<I", n), 16)
            )
            for n in range(count)
        ]
    except EOFError:
        raise not_a_worker from None
    return RpcWorker(
        endpoint, (major, minor, patch), tuple((free, total) for free, total in memory)
    )


def _send_command(connection: socket.socket, command: int, body: bytes, size: int) -> bytes:
    """Send a command with its arguments `body` to a worker, and return the answer. Raises EOFError
    if the answer does not have `size` bytes.
    """
    connection.sendall(struct.pack("<BQ", command, len(body)) + body)
    (length,) = struct.unpack("<Q", _receive(connection, 8))
    if length != size:
        raise EOFError
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes. Raises EOFError if the connection ends before."""
    received = b""
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return received
