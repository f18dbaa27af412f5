"""Requests of foreign web pages are refused; clients that are not browsers are unaffected."""

import json
import socket
from collections.abc import Callable

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from llmcli.serve.http import origin_guard
from tests.api.forms.test_openai_chat import HELLO
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import open_websocket
from tests.serve.http.test_errors import post

CHAT_REQUEST = json.dumps({"messages": HELLO}).encode()
EVIL = "https://evil.example"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LOCALHOST.", 200),
        ("app.localhost:3000", 200),
        ("[::1]:{port}", 200),
        ("192.168.7.7", 200),
        ("host.docker.internal:{port}", 200),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
        ("notlocalhost", 403),
    ],
)
def test_foreign_host_names_are_refused(
    serve: Callable[..., Served], host: str, status: int
) -> None:
    served = serve()
    headers = {"host": host.format(port=served.settings.port)}
    found = [post(served, CHAT_REQUEST, **headers), post(served, b"", "/", "GET", **headers)]
    assert [response[0] for response in found] == [status, status]
    if status == 403:
        assert {response[2]["error"]["type"] for response in found} == {"permission_error"}
        assert all("--allow-host" in response[2]["error"]["message"] for response in found)


def test_allowed_host_names_and_keys_are_accepted(serve: Callable[..., Served]) -> None:
    name = {"host": "box.example"}
    assert post(serve(allow_hosts=("Box.example",)), CHAT_REQUEST, **name)[0] == 200
    assert post(serve(allow_hosts=("*",)), CHAT_REQUEST, **name)[0] == 200
    key = {"authorization": "Bearer secret-key-1"}
    assert post(serve(keys=("secret-key-1",)), CHAT_REQUEST, **name, **key, origin=EVIL)[0] == 200
    assert post(serve(keys=("secret-key-1",)), CHAT_REQUEST, **name)[0] == 401


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://127.0.0.1:1", "http://localhost:3000", "file://", ""]
)
def test_foreign_origins_are_refused_for_any_content_type(
    serve: Callable[..., Served], origin: str
) -> None:
    served = serve()
    for content_type in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        status, _, found = post(
            served, CHAT_REQUEST, **{"origin": origin, "content-type": content_type}
        )
        assert status == 403 and "--cors" in found["error"]["message"]
    assert served.bridge.metrics.last_token_age is None  # no token was generated


def test_the_own_page_and_allowed_origins_must_send_json(serve: Callable[..., Served]) -> None:
    served = serve(cors=("https://good.example",))
    for origin in (served.url, "https://good.example"):
        assert post(served, CHAT_REQUEST, origin=origin)[0] == 200
        assert (
            post(
                served,
                CHAT_REQUEST,
                **{"origin": origin, "content-type": "application/json; charset=utf-8"},
            )[0]
            == 200
        )
        status, _, found = post(
            served, CHAT_REQUEST, **{"origin": origin, "content-type": "text/plain"}
        )
        assert status == 415 and "application/json" in found["error"]["message"]
    assert post(served, CHAT_REQUEST, origin=EVIL)[0] == 403
    any_origin = serve(cors=("*",))
    assert post(any_origin, CHAT_REQUEST, origin=EVIL, host="evil.example")[0] == 200


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("https://Good.example/", "https://good.example"),
        ("http://good.example:80", "http://good.example"),
        ("https://good.example:8443", "https://good.example:8443"),
        ("http://[::1]:3000/", "http://[::1]:3000"),
        ("null", "null"),
        ("*", "*"),
        ("app://obsidian.md", "app://obsidian.md"),
    ],
)
def test_origins_are_normalized(typed: str, sent: str) -> None:
    assert origin_guard.parse_origin(typed) == sent


def test_a_host_name_may_have_a_port(serve: Callable[..., Served]) -> None:
    assert origin_guard.parse_host("Box.example.:8080") == "box.example"
    assert (
        post(serve(allow_hosts=("box.example:8080",)), CHAT_REQUEST, host="box.example")[0] == 200
    )


def test_the_content_type_of_curl_is_accepted(serve: Callable[..., Served]) -> None:
    assert (
        post(serve(), CHAT_REQUEST, **{"content-type": "application/x-www-form-urlencoded"})[0]
        == 200
    )


def test_an_allowed_origin_may_access_the_private_network(serve: Callable[..., Served]) -> None:
    request_headers = {
        "origin": "https://good.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    status, headers, _ = post(
        serve(cors=("https://good.example",)), b"", "/v1/models", "OPTIONS", **request_headers
    )
    assert (status, headers["access-control-allow-private-network"]) == (200, "true")


def test_a_websocket_with_a_foreign_origin_or_host_is_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    with pytest.raises(InvalidStatus) as caught, open_websocket(served, origin=EVIL):
        pass
    assert caught.value.response.status_code == 403
    with (
        socket.create_connection(("127.0.0.1", served.settings.port)) as link,
        pytest.raises(InvalidStatus) as caught,
    ):
        connect("ws://evil.example/v1/ws", sock=link)
    assert caught.value.response.status_code == 403


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//", "http://a b/"])
def test_an_invalid_origin_is_refused(serve: Callable[..., Served], origin: str) -> None:
    served = serve()
    assert post(served, CHAT_REQUEST, origin=origin)[0] == 403
    with (
        pytest.raises(InvalidStatus, match="403"),
        open_websocket(served, additional_headers={"origin": origin}),
    ):
        pass
