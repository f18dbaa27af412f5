"""Requests get a priority above that of others only where the operator allows it."""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.api.forms import FORMS
from llmcli.api.server_settings import ServerSettings
from llmcli.serve.engine_thread.client_requests import client_requests
from tests.fixtures.fakes import fake_runner
from tests.fixtures.server import Served

KEYS = "first-key", "second-key"


def priorities(client: str, priority: int, **settings: Any) -> tuple[set[int], list[str]]:
    """Return the priorities of a client's requests, and the notes for it."""
    server_settings = ServerSettings(("tiny",), keys=KEYS, **settings)
    body = {"prompt": ["a", "b"], "priority": priority, "n": 2}
    form = FORMS["/v1/completions"](body, fake_runner(), server_settings)
    requests = client_requests(form, client, server_settings)
    assert {request.client for request in requests} == {client}
    return {request.priority for request in requests}, form.notes


@pytest.mark.parametrize(
    ("settings", "client", "asked", "given"),
    [
        ({}, KEYS[0], 100, 0),
        ({}, KEYS[0], -7, -7),
        ({}, KEYS[0], 0, 0),
        ({"priority_keys": KEYS[1:]}, KEYS[0], 100, 0),
        ({"priority_keys": KEYS[1:]}, KEYS[1], 100, 100),
        ({"allows_priorities": True}, KEYS[0], 100, 100),
    ],
)
def test_a_priority_counts_where_the_operator_allows_it(
    settings: dict[str, Any], client: str, asked: int, given: int
) -> None:
    found, notes = priorities(client, asked, **settings)
    assert found == {given}
    assert bool(notes) is (given != asked)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_says_that_a_priority_had_no_effect(
    serve: Callable[..., Served], stream: bool
) -> None:
    body = {"model": "tiny", "prompt": "ask", "priority": 3, "stream": stream}
    answer = httpx.post(f"{serve().v1}/completions", json=body)
    assert answer.text.count("priority has no effect") == 1
    answer = httpx.post(f"{serve(allows_priorities=True).v1}/completions", json=body)
    assert answer.status_code == 200 and "priority" not in answer.text
