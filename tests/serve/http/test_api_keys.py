"""The client of a request is identified by its API key, in any header, or by its address, on every
transport.
"""

from collections.abc import Callable

import pytest

from llmcli.serve.http.api_keys import client_id, is_allowed
from tests.api.forms.test_openai_chat import HELLO
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import open_websocket, receive_answers, send_request
from tests.serve.http.test_errors import post

KEYS = "secret-key-1", "secret-key-2"
HEADERS = (
    {"authorization": "Bearer secret-key-1"},
    {"authorization": "bearer   secret-key-1 "},
    {"x-api-key": "secret-key-1"},
)


def test_a_key_is_the_same_client_in_any_header() -> None:
    assert {
        client_id(headers, f"10.0.0.{number}", KEYS) for number, headers in enumerate(HEADERS)
    } == {"secret-key-1"}
    assert client_id(HEADERS[0], "10.0.0.1", ()) == "10.0.0.1"
    assert all(is_allowed(headers, KEYS) for headers in HEADERS)
    for headers in (
        {},
        {"authorization": "secret-key-1"},
        {"authorization": "Bearer"},
        {"x-api-key": "\xff"},
    ):
        assert not is_allowed(headers, KEYS)
        assert is_allowed(headers, ())


def test_every_transport_passes_the_client_on(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(keys=KEYS)
    clients: list[str] = []
    answer = served.bridge.answer

    def record_answer(*requests, samples: int = 1):
        clients.extend(request.client for request in requests)
        return answer(*requests, samples=samples)

    monkeypatch.setattr(served.bridge, "answer", record_answer)
    assert post(served, b'{"prompt": ["x", "y"]}', "/v1/completions", **HEADERS[1])[0] == 200
    with open_websocket(served, additional_headers=HEADERS[2]) as socket:
        send_request(socket, "a", messages=HELLO)
        receive_answers(socket, "a")
    assert clients == ["secret-key-1"] * 3
