"""Every response has an id, which is the client's own if it has sent one."""

from collections.abc import Callable

import httpx2 as httpx
import pytest

from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served


def test_every_response_has_an_id(serve: Callable[..., Served]) -> None:
    served = serve()
    responses = [
        httpx.get(f"{served.url}/health"),
        httpx.get(f"{served.url}/no/such/path"),
        httpx.get(f"{served.url}/health", headers={"host": "evil.example"}),
        httpx.post(f"{served.v1}/chat/completions", content=b"{"),
        httpx.post(f"{served.v1}/chat/completions", json={"messages": HELLO, "stream": True}),
    ]
    assert [response.status_code for response in responses] == [200, 404, 403, 400, 200]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("req_") for name in ids)
    with client(served) as api:
        answer = api.chat.completions.create(model="tiny", messages=HELLO)
    assert (answer._request_id or "").startswith("req_")


@pytest.mark.parametrize(
    ("sent", "is_kept"), [("my-id 7", True), ("x" * 128, True), ("x" * 129, False), ("", False)]
)
def test_the_id_of_the_client_comes_back(
    serve: Callable[..., Served], sent: str, is_kept: bool
) -> None:
    found = httpx.get(f"{serve().url}/health", headers={"X-Request-Id": sent})
    assert (found.headers["x-request-id"] == sent) == is_kept
    assert found.headers["x-request-id"]


def test_anthropics_clients_find_the_id_under_their_name(serve: Callable[..., Served]) -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": HELLO}
    found = httpx.post(f"{serve().v1}/messages", json=body)
    assert found.headers["request-id"] == found.headers["x-request-id"]
