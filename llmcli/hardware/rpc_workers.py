"""Workers: other processes or machines whose devices hold part of a model (llama.cpp's RPC
backend).

llama.cpp aborts where a worker does not answer, speaks another protocol, or is lost, and it waits
for ever for one that is busy with somebody else. So everything is asked here first, in its own
words (ggml-rpc.cpp), with a time limit.
"""

import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.errors import UserError
from llmcli.hardware.host import identity as host_identity
from llmcli.runtime.binding import devices, rpc

PORT = 50052  # ggml-rpc-server's own
PROTOCOL = (7, 0)  # RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION of ggml-rpc.h
PATIENCE = 5.0  # seconds until a worker counts as busy
HELLO, DEVICE_COUNT, DEVICE_MEMORY = 14, 15, 11  # enum rpc_cmd
CAPABILITIES = 24  # bytes; zeros: plain TCP
MOST_DEVICES = 64  # of one worker; more is no count


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as it answered: its address, protocol, and each device's free and total bytes."""

    endpoint: str
    protocol: tuple[int, int, int]
    memory: tuple[tuple[int, int], ...]


def endpoints(text: str) -> tuple[str, ...]:
    """ "host:port,host:port" as a list, each with its port; raises UserError."""
    found = []
    for word in (part.strip() for part in text.split(",")):
        host, colon, port = word.partition(":")
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
        if not host or (colon and not 1 <= number <= 65535):
            raise UserError(
                f"--rpc: {word!r} is no worker's address", hint=f"--rpc HOST:{PORT},HOST:{PORT}"
            )
        found.append(f"{host}:{number or PORT}")
    unique = tuple(dict.fromkeys(found))
    if len(unique) > rpc.MAX_WORKERS:
        raise UserError(
            f"--rpc names {len(unique)} workers",
            hint=f"llama.cpp takes up to {rpc.MAX_WORKERS}",
        )
    return unique


def join(addresses: Sequence[str], parts: Sequence[float] = ()) -> tuple[Worker, ...]:
    """Let models of this process lie on these workers, too; `parts`: in which proportions, instead
    of by free memory.

    Raises UserError where one cannot be used. None is joined before all have answered.
    """
    found = tuple(ask(one) for one in addresses if one not in rpc.joined_workers())
    for one in found:
        rpc.join_worker(one.endpoint)
    places = sum(one.kind in devices.GPU_KINDS for one in devices.list_devices()) if parts else 0
    if len(parts) > places:
        raise UserError(
            f"--tensor-split has {len(parts)} parts for {places} devices",
            hint="one number for each worker's device, in their order, then one for each GPU here",
        )
    devices.set_tensor_split(parts)
    return found


def ask(endpoint: str) -> Worker:
    """What a worker says of itself; raises UserError where it cannot be used."""
    host, _, port = endpoint.rpartition(":")
    try:
        # llama.cpp knows IPv4 alone, and takes the first address of a name.
        address = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise UserError(
            f"{host} has no IPv4 address: {error.strerror}", hint="check the name after --rpc"
        ) from None
    try:
        with socket.create_connection((str(address[0]), int(address[1])), timeout=PATIENCE) as link:
            return _ask(link, endpoint)
    except TimeoutError:
        raise UserError(
            f"the worker at {endpoint} does not answer within {PATIENCE:.0f} seconds",
            hint="it serves one client at a time: end the other one, or start another worker on another port",
        ) from None
    except OSError as error:
        raise UserError(
            f"no worker at {endpoint}: {error.strerror or error}",
            hint=f"on that machine: llmcli worker --rpc --port {port}",
        ) from None


def gone(addresses: Sequence[str]) -> list[str]:
    """Those of them where nobody listens."""

    def listens(endpoint: str) -> bool:
        host, _, port = endpoint.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return True
        except OSError:
            return False

    return [one for one in addresses if not listens(one)]


def identity() -> str:
    """What a measurement of this process holds for: the machine, and the workers that its models
    lie on.
    """
    found = rpc.joined_workers()
    return host_identity() + (f", workers {' '.join(found)}" if found else "")


def loopback(host: str) -> bool:
    """Whether an address is this machine's own, seen by nobody else; raises UserError for what is
    no IPv4 address.
    """
    try:
        return ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host).is_loopback
    except ValueError:
        raise UserError(
            f"--host {host!r} is no IPv4 address", hint="--host 127.0.0.1, or 0.0.0.0 for all"
        ) from None


def _ask(link: socket.socket, endpoint: str) -> Worker:
    stranger = UserError(
        f"what answers at {endpoint} is no llama.cpp worker", hint="check the port"
    )
    try:
        answer = _call(link, HELLO, bytes(CAPABILITIES), 4 + CAPABILITIES)
    except EOFError:
        raise stranger from None
    major, minor, patch = answer[0], answer[1], answer[2]
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise UserError(
            f"the worker at {endpoint} speaks protocol {major}.{minor}, this build {PROTOCOL[0]}.{PROTOCOL[1]}",
            hint="use the same version of llmcli on both machines",
        )
    try:
        (count,) = struct.unpack("<I", _call(link, DEVICE_COUNT, b"", 4))
        if not 0 < count <= MOST_DEVICES:
            raise stranger
        memory = [
            struct.unpack("<QQ", _call(link, DEVICE_MEMORY, struct.pack("<I", n), 16))
            for n in range(count)
        ]
    except EOFError:
        raise stranger from None
    return Worker(endpoint, (major, minor, patch), tuple((free, total) for free, total in memory))


def _call(link: socket.socket, command: int, body: bytes, size: int) -> bytes:
    """One question and its answer of `size` bytes; raises EOFError for any other."""
    link.sendall(struct.pack("<BQ", command, len(body)) + body)
    (told,) = struct.unpack("<Q", _read(link, 8))
    if told != size:
        raise EOFError
    return _read(link, size)


def _read(link: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = link.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found
