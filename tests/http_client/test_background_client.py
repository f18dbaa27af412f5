"""Streams that a thread of their own receives."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmcli.http_client.background_client import open_background_client
from llmcli.http_client.client import ConnectionSettings, HttpClient, RequestError
from tests.fixtures.load_server import Scripted, plain, streamed

PLAIN = ConnectionSettings(uses_tls=False)
BODY = b'{"stream": true}'


def test_an_error_is_raised_after_the_pieces_before_it(scripted: Callable[..., Scripted]) -> None:
    whole = streamed("a", done=False).partition(b"\r\n\r\n")[2]
    server = scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + whole)
    received = []
    with open_background_client(PLAIN) as client:
        pieces = map(received.append, client.post(server.url + "/x", BODY))
        with pytest.raises(RequestError) as caught:
            list(pieces)
    assert b"".join(piece for _, piece in received) == whole
    assert caught.value.kind == "broken off"


def test_a_stopped_stream_ends_without_an_error(scripted: Callable[..., Scripted]) -> None:
    server = scripted(streamed("a", done=False))
    server.holds = True
    with open_background_client(PLAIN) as client:
        stream = client.post(server.url + "/x", BODY)
        for _ in stream:
            stream.stop()
        assert server.client_left.wait(30)


def test_the_end_of_the_client_ends_its_streams(scripted: Callable[..., Scripted]) -> None:
    server = scripted(streamed("a", done=False))
    server.holds = True
    with open_background_client(PLAIN) as client:
        pieces = iter(client.post(server.url + "/x", BODY))
        next(pieces)
    assert server.client_left.wait(30)
    assert not list(pieces)


def test_a_bug_is_not_taken_for_the_end_of_a_stream(
    scripted: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def broken(self: HttpClient, url: str, body: bytes) -> AsyncIterator[Any]:
        raise ZeroDivisionError
        yield

    monkeypatch.setattr(HttpClient, "stream", broken)
    server = scripted(plain({}))
    with open_background_client(PLAIN) as client, pytest.raises(ZeroDivisionError):
        list(client.post(server.url + "/x", BODY))
