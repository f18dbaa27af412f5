"""The HTTP client reads JSON and streams, and reports failed requests by kind and message."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.http_client import client as http_client
from llmcli.http_client.client import ConnectionSettings, RequestError, StatusError
from tests.fixtures.load_server import Scripted, plain, streamed

Servers = Callable[..., Scripted]
PLAIN = ConnectionSettings(uses_tls=False)
BODY = b'{"stream": true}'


def fetch(url: str, settings: ConnectionSettings = PLAIN) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with http_client.open_http_client(settings) as client:
            return await client.fetch_json(url)

    return asyncio.run(run())


def read(url: str, settings: ConnectionSettings = PLAIN) -> bytes:
    async def run() -> bytes:
        async with (
            http_client.open_http_client(settings) as client,
            client.stream(url, BODY) as response,
        ):
            return b"".join([piece async for piece in response.pieces()])

    return asyncio.run(run())


def test_json_and_streams_are_read(scripted: Servers) -> None:
    server = scripted(streamed("a"))
    assert fetch(server.url + "/v1/models") == {"data": [{"id": "scripted"}]}
    assert read(server.url + "/x", ConnectionSettings(False, "secret")).endswith(
        b"data: [DONE]\n\n"
    )
    assert "Authorization: Bearer secret" in server.heads[0]


def test_an_error_status_raises_the_servers_message(scripted: Servers) -> None:
    server = scripted(plain({"error": {"message": "busy"}}, "429 Too Many"), plain({}, "302 Found"))
    for kind, message in (("http 429", "busy"), ("http 302", "{}")):
        with pytest.raises(StatusError) as caught:
            read(server.url + "/x")
        assert (caught.value.kind, caught.value.message) == (kind, message)


def test_network_failures_and_bad_bodies_have_a_kind(
    scripted: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = scripted(streamed("a"), b"")
    for kind, url, settings in (
        ("no connection", "http://127.0.0.1:1", PLAIN),
        ("timeout", server.url, ConnectionSettings(False, timeout_seconds=0.0)),
    ):
        with pytest.raises(RequestError) as caught:
            read(url, settings)
        assert caught.value.kind == kind
    with pytest.raises(RequestError) as caught:
        fetch(server.url + "/odd")
    assert caught.value.kind == "bad stream"
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 3)
    with pytest.raises(RequestError, match="too long"):
        fetch(server.url + "/v1/models")


def test_a_bad_certificate_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("no certificate")
    with pytest.raises(UserError, match="is not a certificate"):
        fetch("https://127.0.0.1:1", ConnectionSettings(True, cacert=tmp_path / "a.pem"))
