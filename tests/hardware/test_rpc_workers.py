"""The probe of RPC workers before llama.cpp connects: workers that run, are silent, or are another
program.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from llmcli.errors import UserError
from llmcli.hardware import rpc_workers
from llmcli.runtime.binding.placement import rpc

HELLO = struct.pack("<Q", 28) + bytes([7, 0, 3, 0]) + bytes(24)
COUNT = struct.pack("<QI", 4, 2)
MEMORY = [struct.pack("<QQQ", 16, 10 * n, 20 * n) for n in (1, 2)]


@pytest.fixture
def worker() -> Iterator[Callable[..., str]]:
    """Return a function that starts a server and returns its address. The server sends the given
    answers, one for each request, and closes the connection. For None it sends nothing.
    """
    servers: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(server: socket.socket, answers: tuple[bytes | None, ...]) -> None:
        connection, _ = server.accept()
        with connection:
            for answer in answers:
                if not connection.recv(4096):
                    return
                if answer is None:
                    connection.recv(1)  # returns when the client closes the connection
                    return
                connection.sendall(answer)

    def start(*answers: bytes | None) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        threads.append(threading.Thread(target=serve, args=(server, answers)))
        threads[-1].start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for thread in threads:
        thread.join()
    for server in servers:
        server.close()


def test_probe_returns_the_version_and_the_memory_of_the_devices(
    worker: Callable[..., str],
) -> None:
    endpoint = worker(HELLO, COUNT, *MEMORY)
    assert rpc_workers.probe_worker(endpoint) == rpc_workers.RpcWorker(
        endpoint, (7, 0, 3), ((10, 20), (20, 40))
    )


def test_error_if_no_worker_listens(worker: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    with pytest.raises(UserError, match="no worker at") as refused:
        rpc_workers.probe_worker(f"127.0.0.1:{free_port}")
    assert f"--port {free_port}" in refused.value.hint


def test_error_if_a_worker_is_busy(
    worker: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_workers, "TIMEOUT_SECONDS", 0.05)
    with pytest.raises(UserError, match="did not answer") as refused:
        rpc_workers.probe_worker(worker(None))
    assert "one client at a time" in refused.value.hint


def test_error_if_llama_cpp_does_not_print_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    rpc_workers.protocol_version.cache_clear()
    monkeypatch.setattr(rpc_workers, "VERSION_PROGRAM", "print('Starting RPC server')")
    with pytest.raises(UserError, match=r"does not print the protocol of its workers"):
        rpc_workers.protocol_version()


@pytest.mark.parametrize("version", [(6, 0), (8, 0), (7, 1)])
def test_error_for_another_protocol_version(
    worker: Callable[..., str], version: tuple[int, int]
) -> None:
    with pytest.raises(
        UserError, match=rf"uses protocol {version[0]}\.{version[1]}, this build 7\.0"
    ):
        rpc_workers.probe_worker(
            worker(struct.pack("<Q", 28) + bytes([*version, 0, 0]) + bytes(24))
        )


@pytest.mark.parametrize(
    "answers",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
        (b"",),
        (HELLO, struct.pack("<QI", 4, 0)),
        (HELLO, struct.pack("<QI", 4, 1 << 30)),
        (HELLO, b"x"),
    ],
)
def test_error_if_another_program_answers(
    worker: Callable[..., str], answers: tuple[bytes, ...]
) -> None:
    with pytest.raises(UserError, match=r"is not a llama\.cpp worker"):
        rpc_workers.probe_worker(worker(*answers))


def test_parsing_of_worker_addresses() -> None:
    assert rpc_workers.parse_endpoints("a, b:1,a:50052") == ("a:50052", "b:1")
    for text in ("", "a,,b", ":5", "a:0", "a:99999", "a:b", "::1"):
        with pytest.raises(UserError, match="invalid worker address"):
            rpc_workers.parse_endpoints(text)
    with pytest.raises(UserError, match="17 workers"):
        rpc_workers.parse_endpoints(",".join(f"h{n}" for n in range(17)))


def test_loopback_addresses() -> None:
    assert rpc_workers.is_loopback("127.0.0.1")
    assert rpc_workers.is_loopback("localhost")
    assert not rpc_workers.is_loopback("0.0.0.0")
    assert not rpc_workers.is_loopback("10.0.0.1")
    with pytest.raises(UserError, match="IPv4 address"):
        rpc_workers.is_loopback("::1")


def test_keepalive_is_enabled_for_open_connections() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        assert not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        rpc.enable_keepalive()
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
