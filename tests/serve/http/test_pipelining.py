"""Pipelined requests, responses that the client does not read, and bodies that the server does not
read.
"""

import asyncio
import re
import socket
import threading
from collections.abc import Callable

import pytest

from llmcli.serve.http import http_connection
from tests.fixtures.server import Served
from tests.serve.http.test_errors import post
from tests.serve.http.test_http_connection import GOOD, connect_to, wait_until_closed

LAST = GOOD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
NOTHING = b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"


def completion_request(body: bytes, *headers: bytes) -> bytes:
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"host: localhost",
        b"content-length: %d" % len(body),
        *headers,
    )
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


STREAM = completion_request(b'{"prompt": "x", "stream": true, "max_tokens": 3}')


def receive_until_closed(link: socket.socket, sent: bytes) -> bytes:
    """Send bytes, and return everything that is received until the connection closes."""
    threading.Thread(target=link.sendall, args=(sent,), daemon=True).start()
    raw = b""
    with link:
        while received := link.recv(1 << 16):
            raw += received
    return raw


def statuses(raw: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", raw)]


def is_refused(link: socket.socket) -> bool:
    """Read a whole response, and return whether it has status 401."""
    raw = b""
    while not raw.endswith(b'"invalid_api_key"}}'):
        raw += link.recv(65536)
    return statuses(raw) == [401]


def test_a_thousand_pipelined_requests_are_answered_in_order(serve: Callable[..., Served]) -> None:
    served = serve()
    kinds = [
        (GOOD, 200),
        (NOTHING, 404),
        (completion_request(b"{"), 400),
        (STREAM, 200),
        (completion_request(b'{"prompt": 1}'), 400),
    ]
    raw = receive_until_closed(
        connect_to(served), b"".join(kinds[number % 5][0] for number in range(1000)) + LAST
    )
    assert statuses(raw) == [kinds[number % 5][1] for number in range(1000)] + [200]
    assert raw.count(b"data: [DONE]") == 200


def test_requests_after_connection_close_are_not_answered(serve: Callable[..., Served]) -> None:
    served = serve()
    assert statuses(receive_until_closed(connect_to(served), GOOD + LAST + STREAM + NOTHING)) == [
        200,
        200,
    ]
    assert post(served, b"", "/health", "GET")[0] == 200


GARBAGE = b"\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_after_a_request_does_not_break_its_response(
    serve: Callable[..., Served], garbage: bytes
) -> None:
    raw = receive_until_closed(connect_to(serve()), STREAM + garbage)
    answer, _, remainder = raw.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert statuses(answer) == [200]
    assert statuses(remainder) in ([], [400])


def test_an_invalid_body_after_its_response_closes_the_connection(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(keys=("secret-key-1",))
    link = connect_to(served)
    link.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    assert is_refused(link)
    link.sendall(b"no chunk\r\n")
    assert wait_until_closed(link)
    assert [status for status in caplog.records if status.levelname == "ERROR"] == []


def test_a_long_body_without_a_key_is_refused(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(keys=("secret-key-1",))
    long = completion_request(b"x" * 1_000_000)
    with connect_to(served) as link:
        for _ in range(2):  # the connection stays open
            link.sendall(long)
            assert is_refused(link)
    monkeypatch.setattr(http_connection, "MAX_UNREAD_BODY_BYTES", 100_000)
    link = connect_to(served)
    head, body = long.replace(b"1000000", b"1000000000")[:200], long[-500_000:]
    link.sendall(head)
    assert is_refused(link)
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 (any of these calls may raise)
        while True:
            link.sendall(body)
    link.close()


def test_an_unread_body_must_arrive_in_time(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(keys=("secret-key-1",))
    link = connect_to(served)
    link.sendall(completion_request(b"x" * 1000)[:-900])
    assert is_refused(link)
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    link.sendall(b"x")
    assert wait_until_closed(link)


def test_a_client_that_does_not_read_is_disconnected(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    served = serve()
    with connect_to(served) as link:
        link.sendall(GOOD.replace(b"/health", b"/") * 1000)
        assert link.recv(1)  # the server has begun to respond

        async def all_closed() -> None:
            while served.server.server_state.connections:
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(all_closed(), served.server.servers[0].get_loop()).result(
            30
        )
    assert post(served, b"", "/health", "GET")[0] == 200
