"""A request's client: its key in any form, or its address, on every transport."""

from collections.abc import Callable

import pytest

from llmcli.serve.http.api_keys import client_id, is_allowed
from tests.api.forms.test_openai_chat import HELLO
from tests.fixtures.server import Served
from tests.serve.http.routes.test_websocket import ask, opened, until_over
from tests.serve.http.test_errors import post

KEYS = "secret-key-1", "secret-key-2"
WAYS = (
    {"authorization": "Bearer secret-key-1"},
    {"authorization": "bearer   secret-key-1 "},
    {"x-api-key": "secret-key-1"},
)


def test_a_key_is_one_client_however_it_is_written() -> None:
    assert {
        client_id(headers, f"10.0.0.{number}", KEYS) for number, headers in enumerate(WAYS)
    } == {"secret-key-1"}
    assert client_id(WAYS[0], "10.0.0.1", ()) == "10.0.0.1"
    assert all(is_allowed(headers, KEYS) for headers in WAYS)
    for headers in (
        {},
        {"authorization": "secret-key-1"},
        {"authorization": "Bearer"},
        {"x-api-key": "\xff"},
    ):
        assert not is_allowed(headers, KEYS)
        assert is_allowed(headers, ())


def test_every_way_in_tells_whose_it_is(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(keys=KEYS)
    whose: list[str] = []
    answer = served.bridge.answer

    def heard(*requests, samples: int = 1):
        whose.extend(one.client for one in requests)
        return answer(*requests, samples=samples)

    monkeypatch.setattr(served.bridge, "answer", heard)
    assert post(served, b'{"prompt": ["x", "y"]}', "/v1/completions", **WAYS[1])[0] == 200
    with opened(served, additional_headers=WAYS[2]) as talk:
        ask(talk, "a", messages=HELLO)
        until_over(talk, "a")
    assert whose == ["secret-key-1"] * 3
