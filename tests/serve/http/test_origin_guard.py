"""Pages of other origins are refused; clients that are not browsers are unaffected."""

import json
import socket
from collections.abc import Callable

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from llmcli.serve.http import origin_guard
from tests.api.forms.test_openai_chat import HELLO
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import opened
from tests.serve.http.test_errors import post

ASK = json.dumps({"messages": HELLO}).encode()
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
def test_a_name_that_was_made_to_mean_this_machine_is_refused(
    serve: Callable[..., Served], host: str, status: int
) -> None:
    served = serve()
    asked = {"host": host.format(port=served.settings.port)}
    found = [post(served, ASK, **asked), post(served, b"", "/", "GET", **asked)]
    assert [one[0] for one in found] == [status, status]
    if status == 403:
        assert {one[2]["error"]["type"] for one in found} == {"permission_error"}
        assert all("--allow-host" in one[2]["error"]["message"] for one in found)


def test_names_that_were_told_and_keys_open_the_door(serve: Callable[..., Served]) -> None:
    name = {"host": "box.example"}
    assert post(serve(allow_hosts=("Box.example",)), ASK, **name)[0] == 200
    assert post(serve(allow_hosts=("*",)), ASK, **name)[0] == 200
    key = {"authorization": "Bearer secret-key-1"}
    assert post(serve(keys=("secret-key-1",)), ASK, **name, **key, origin=EVIL)[0] == 200
    assert post(serve(keys=("secret-key-1",)), ASK, **name)[0] == 401


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://127.0.0.1:1", "http://localhost:3000", "file://", ""]
)
def test_other_pages_are_refused_whatever_they_send(
    serve: Callable[..., Served], origin: str
) -> None:
    served = serve()
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        status, _, found = post(served, ASK, **{"origin": origin, "content-type": kind})
        assert status == 403 and "--cors" in found["error"]["message"]
    assert served.bridge.metrics.last_token_age is None  # the model was not asked


def test_our_own_page_and_allowed_ones_ask_with_json_alone(serve: Callable[..., Served]) -> None:
    served = serve(cors=("https://good.example",))
    for origin in (served.url, "https://good.example"):
        assert post(served, ASK, origin=origin)[0] == 200
        assert (
            post(
                served, ASK, **{"origin": origin, "content-type": "application/json; charset=utf-8"}
            )[0]
            == 200
        )
        status, _, found = post(served, ASK, **{"origin": origin, "content-type": "text/plain"})
        assert status == 415 and "application/json" in found["error"]["message"]
    assert post(served, ASK, origin=EVIL)[0] == 403
    anyone = serve(cors=("*",))
    assert post(anyone, ASK, origin=EVIL, host="evil.example")[0] == 200


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
def test_an_origin_is_taken_as_people_type_it(typed: str, sent: str) -> None:
    assert origin_guard.parse_origin(typed) == sent


def test_a_name_is_taken_with_its_port(serve: Callable[..., Served]) -> None:
    assert origin_guard.parse_host("Box.example.:8080") == "box.example"
    assert post(serve(allow_hosts=("box.example:8080",)), ASK, host="box.example")[0] == 200


def test_curl_says_that_it_sends_a_form_and_is_answered(serve: Callable[..., Served]) -> None:
    assert post(serve(), ASK, **{"content-type": "application/x-www-form-urlencoded"})[0] == 200


def test_a_page_on_the_network_may_be_let_to_this_machine(serve: Callable[..., Served]) -> None:
    asked = {
        "origin": "https://good.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    status, headers, _ = post(
        serve(cors=("https://good.example",)), b"", "/v1/models", "OPTIONS", **asked
    )
    assert (status, headers["access-control-allow-private-network"]) == (200, "true")


def test_a_socket_of_another_page_or_name_is_not_opened(serve: Callable[..., Served]) -> None:
    served = serve()
    with pytest.raises(InvalidStatus) as told, opened(served, origin=EVIL):
        pass
    assert told.value.response.status_code == 403
    with (
        socket.create_connection(("127.0.0.1", served.settings.port)) as link,
        pytest.raises(InvalidStatus) as told,
    ):
        connect("ws://evil.example/v1/ws", sock=link)
    assert told.value.response.status_code == 403


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//", "http://a b/"])
def test_an_origin_that_is_no_address_is_refused(serve: Callable[..., Served], origin: str) -> None:
    served = serve()
    assert post(served, ASK, origin=origin)[0] == 403
    with (
        pytest.raises(InvalidStatus, match="403"),
        opened(served, additional_headers={"origin": origin}),
    ):
        pass
