"""RPC workers are checked before llama.cpp connects: running, silent, or another program."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from llmcli.errors import UserError
from llmcli.hardware import rpc_workers
from llmcli.runtime.binding import rpc

HELLO = struct.pack("<Q", 28) + bytes([7, 0, 3, 0]) + bytes(24)
COUNT = struct.pack("<QI", 4, 2)
MEMORY = [struct.pack("<QQQ", 16, 10 * n, 20 * n) for n in (1, 2)]


@pytest.fixture
def worker() -> Iterator[Callable[..., str]]:
    """Somebody who says these answers to whatever it is asked, one after another, and closes; None:
    says nothing.
    """
    held: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def answer(server: socket.socket, answers: tuple[bytes | None, ...]) -> None:
        link, _ = server.accept()
        with link:
            for one in answers:
                if not link.recv(4096):
                    return
                if one is None:
                    link.recv(1)  # until the asker is tired of it
                    return
                link.sendall(one)

    def start(*answers: bytes | None) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        held.append(server)
        threads.append(threading.Thread(target=answer, args=(server, answers)))
        threads[-1].start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for thread in threads:
        thread.join()
    for server in held:
        server.close()


def test_a_worker_tells_its_memory(worker: Callable[..., str]) -> None:
    endpoint = worker(HELLO, COUNT, *MEMORY)
    assert rpc_workers.probe_worker(endpoint) == rpc_workers.RpcWorker(
        endpoint, (7, 0, 3), ((10, 20), (20, 40))
    )


def test_nobody_there(worker: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(UserError, match="no worker at") as refused:
        rpc_workers.probe_worker(f"127.0.0.1:{free}")
    assert f"--port {free}" in refused.value.hint


def test_a_busy_worker_is_not_waited_for(
    worker: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_workers, "TIMEOUT_SECONDS", 0.05)
    with pytest.raises(UserError, match="did not answer") as refused:
        rpc_workers.probe_worker(worker(None))
    assert "one client at a time" in refused.value.hint


@pytest.mark.parametrize("version", [(6, 0), (8, 0), (7, 1)])
def test_another_protocol(worker: Callable[..., str], version: tuple[int, int]) -> None:
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
def test_a_stranger(worker: Callable[..., str], answers: tuple[bytes, ...]) -> None:
    with pytest.raises(UserError, match=r"is not a llama\.cpp worker"):
        rpc_workers.probe_worker(worker(*answers))


def test_addresses() -> None:
    assert rpc_workers.parse_endpoints("a, b:1,a:50052") == ("a:50052", "b:1")
    for text in ("", "a,,b", ":5", "a:0", "a:99999", "a:b", "::1"):
        with pytest.raises(UserError, match="invalid worker address"):
            rpc_workers.parse_endpoints(text)
    with pytest.raises(UserError, match="17 workers"):
        rpc_workers.parse_endpoints(",".join(f"h{n}" for n in range(17)))


def test_what_is_this_machine_alone() -> None:
    assert rpc_workers.is_loopback("127.0.0.1")
    assert rpc_workers.is_loopback("localhost")
    assert not rpc_workers.is_loopback("0.0.0.0")
    assert not rpc_workers.is_loopback("10.0.0.1")
    with pytest.raises(UserError, match="IPv4 address"):
        rpc_workers.is_loopback("::1")


def test_the_kernel_probes_a_link_that_was_made() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as link,
    ):
        assert not link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        rpc.enable_keepalive()
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
