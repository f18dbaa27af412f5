"""Pipelined requests, answers that are not read, and bodies that are refused unread."""

import asyncio
import re
import socket
import threading
from collections.abc import Callable

import pytest

from llmcli.serve.http import http_connection
from tests.fixtures.server import Served
from tests.serve.http.test_errors import post
from tests.serve.http.test_http_connection import GOOD, closed, open_to

LAST = GOOD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
NOTHING = b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"


def posted(body: bytes, *headers: bytes) -> bytes:
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"host: localhost",
        b"content-length: %d" % len(body),
        *headers,
    )
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


STREAM = posted(b'{"prompt": "x", "stream": true, "max_tokens": 3}')


def until_closed(link: socket.socket, sent: bytes) -> bytes:
    """All that comes back for what is sent at once."""
    threading.Thread(target=link.sendall, args=(sent,), daemon=True).start()
    raw = b""
    with link:
        while part := link.recv(1 << 16):
            raw += part
    return raw


def statuses(raw: bytes) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+)", raw)]


def refused(link: socket.socket) -> bool:
    """Whether a whole answer says that a key is needed."""
    raw = b""
    while not raw.endswith(b'"invalid_api_key"}}'):
        raw += link.recv(65536)
    return statuses(raw) == [401]


def test_a_thousand_at_once_are_answered_in_their_order(serve: Callable[..., Served]) -> None:
    served = serve()
    kinds = [
        (GOOD, 200),
        (NOTHING, 404),
        (posted(b"{"), 400),
        (STREAM, 200),
        (posted(b'{"prompt": 1}'), 400),
    ]
    raw = until_closed(
        open_to(served), b"".join(kinds[number % 5][0] for number in range(1000)) + LAST
    )
    assert statuses(raw) == [kinds[number % 5][1] for number in range(1000)] + [200]
    assert raw.count(b"data: [DONE]") == 200


def test_what_follows_a_close_is_not_answered(serve: Callable[..., Served]) -> None:
    served = serve()
    assert statuses(until_closed(open_to(served), GOOD + LAST + STREAM + NOTHING)) == [200, 200]
    assert post(served, b"", "/health", "GET")[0] == 200


GARBAGE = b"\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"


@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_answer_is_broken_by_what_comes_behind_its_request(
    serve: Callable[..., Served], garbage: bytes
) -> None:
    raw = until_closed(open_to(serve()), STREAM + garbage)
    answer, _, rest = raw.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert statuses(answer) == [200]
    assert statuses(rest) in ([], [400])


def test_a_body_that_is_none_behind_its_answer_closes_the_connection(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(keys=("secret-key-1",))
    link = open_to(served)
    link.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    assert refused(link)
    link.sendall(b"no chunk\r\n")
    assert closed(link)
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


def test_who_sends_a_long_body_without_a_key_is_told_so(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(keys=("secret-key-1",))
    long = posted(b"x" * 1_000_000)
    with open_to(served) as link:
        for _ in range(2):  # the connection is good for another
            link.sendall(long)
            assert refused(link)
    monkeypatch.setattr(http_connection, "MAX_UNREAD_BODY_BYTES", 100_000)
    link = open_to(served)
    head, body = long.replace(b"1000000", b"1000000000")[:200], long[-500_000:]
    link.sendall(head)
    assert refused(link)
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 (which of them tells is the system's)
        while True:
            link.sendall(body)
    link.close()


def test_a_body_behind_its_answer_has_a_time(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(keys=("secret-key-1",))
    link = open_to(served)
    link.sendall(posted(b"x" * 1000)[:-900])
    assert refused(link)
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    link.sendall(b"x")
    assert closed(link)


def test_who_reads_no_answers_is_cut(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "TIMEOUT_SECONDS", 0.05)
    served = serve()
    with open_to(served) as link:
        link.sendall(GOOD.replace(b"/health", b"/") * 1000)
        assert link.recv(1)  # it is there

        async def gone() -> None:
            while served.server.server_state.connections:
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(gone(), served.server.servers[0].get_loop()).result(30)
    assert post(served, b"", "/health", "GET")[0] == 200
