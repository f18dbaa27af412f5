"""Connections without a request, and request heads without an end."""

import resource
import socket
from collections.abc import Callable

import pytest

from llmcli.serve import server
from llmcli.serve.http import http_connection
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import ask, opened, text, until_over
from tests.serve.http.test_errors import post

GOOD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def open_to(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.settings.port), timeout=30)


def closed(link: socket.socket) -> bool:
    """Whether the server ends it, within its timeout."""
    with link:
        try:
            while link.recv(65536):
                pass
        except ConnectionResetError:
            pass
    return True


@pytest.mark.parametrize(
    "begun", [b"", b"GET /health HTTP/1.1\r\nhost: l", b"POST /v1/completions HTTP/1.1\r\n"]
)
def test_who_sends_no_request_is_sent_away(
    serve: Callable[..., Served], begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    served = serve()
    link = open_to(served)
    link.sendall(begun)
    assert closed(link)
    assert post(served, b"", "/health", "GET")[0] == 200


def test_the_head_of_a_second_request_has_its_time_too(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    link = open_to(served)
    link.sendall(GOOD)
    assert link.recv(65536).startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    link.sendall(GOOD[:20])
    assert closed(link)


def test_a_socket_and_a_long_answer_outlive_it(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    served = serve()
    with opened(served) as talk:
        assert closed(open_to(served))  # so much time has passed
        ask(talk, "a", stream=True)
        assert text(until_over(talk, "a")["a"]) == "hello"


def test_a_head_without_an_end_is_not_read_to_it(serve: Callable[..., Served]) -> None:
    served = serve()
    link = open_to(served)
    link.sendall(GOOD[:-2])
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 (which of them tells is the system's)
        for number in range(100_000):
            link.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))
    link.close()
    assert post(served, b"", "/health", "GET")[0] == 200


def test_requests_that_lie_ready_are_answered_in_turn(tiny: Served) -> None:
    with open_to(tiny) as link:
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


def test_as_many_connections_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: told.append((which, limits)))
    for limits, most in (
        ((1024, 4096), 4096),
        ((1024, resource.RLIM_INFINITY), 65536),
        ((70_000, 80_000), 70_000),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        server._raise_file_limit()
        assert told.pop() == (resource.RLIMIT_NOFILE, (most, limits[1]))
