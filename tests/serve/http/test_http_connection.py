"""Connections without a request, request heads without an end, and the limit of open files."""

import resource
import socket
from collections.abc import Callable

import pytest

from llmcli.serve import server
from llmcli.serve.http import http_connection
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import (
    joined_text,
    open_websocket,
    receive_answers,
    send_request,
)
from tests.serve.http.test_errors import post

GOOD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connect_to(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.settings.port), timeout=30)


def wait_until_closed(link: socket.socket) -> bool:
    """Read until the server closes the connection, and return True."""
    with link:
        try:
            while link.recv(65536):
                pass
        except ConnectionResetError:
            pass
    return True


@pytest.mark.parametrize(
    "received", [b"", b"GET /health HTTP/1.1\r\nhost: l", b"POST /v1/completions HTTP/1.1\r\n"]
)
def test_a_connection_without_a_request_is_closed(
    serve: Callable[..., Served], received: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    served = serve()
    link = connect_to(served)
    link.sendall(received)
    assert wait_until_closed(link)
    assert post(served, b"", "/health", "GET")[0] == 200


def test_an_incomplete_second_head_is_closed(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    link = connect_to(served)
    link.sendall(GOOD)
    assert link.recv(65536).startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    link.sendall(GOOD[:20])
    assert wait_until_closed(link)


def test_a_websocket_outlives_the_head_timeout(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    served = serve()
    with open_websocket(served) as socket_client:
        assert wait_until_closed(connect_to(served))  # the timeout of the first head has passed
        send_request(socket_client, "a", stream=True)
        assert joined_text(receive_answers(socket_client, "a")["a"]) == "hello"


def test_an_endless_head_closes_the_connection(serve: Callable[..., Served]) -> None:
    served = serve()
    link = connect_to(served)
    link.sendall(GOOD[:-2])
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 (any of these calls may raise)
        for number in range(100_000):
            link.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))
    link.close()
    assert post(served, b"", "/health", "GET")[0] == 200


def test_pipelined_requests_are_answered_in_order(tiny: Served) -> None:
    with connect_to(tiny) as link:
        body = b'{"prompt": "x", "max_tokens": 3}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        link.sendall((head + body) * 3)
        raw = b""
        while raw.count(b'"total_tokens"') < 3:
            raw += link.recv(65536)
    assert raw.count(b"HTTP/1.1 200 OK") == 3


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: calls.append((which, limits)))
    for limits, expected in (
        ((1024, 4096), 4096),
        ((1024, resource.RLIM_INFINITY), 65536),
        ((70_000, 80_000), 70_000),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        server._raise_file_limit()
        assert calls.pop() == (resource.RLIMIT_NOFILE, (expected, limits[1]))
