"""Every route needs the API key unless it is public, and responds to any body."""

from collections.abc import Callable

import pytest

from llmcli.serve.http.routes import ROUTES
from tests.fixtures.server import Served
from tests.serve.http.test_errors import post

KEY = "secret"
PATHS = sorted(path for path, route in ROUTES.items() if not route.is_websocket)


@pytest.mark.parametrize("path", PATHS)
def test_a_route_needs_the_key_unless_it_is_public(path: str, serve: Callable[..., Served]) -> None:
    served, route = serve(keys=(KEY,)), ROUTES[path]
    for address in (path, *route.further_paths):
        status, _, _ = post(served, b"", address.replace("{name:path}", "tiny"), route.methods[0])
        assert (status == 401) == (not route.is_public)


@pytest.mark.parametrize("path", PATHS)
def test_a_route_responds_to_an_empty_object(path: str, serve: Callable[..., Served]) -> None:
    served, route = serve(keys=(KEY,)), ROUTES[path]
    for method in route.methods:
        status, headers, _ = post(
            served,
            b"{}",
            path.replace("{name:path}", "tiny"),
            method,
            authorization=f"Bearer {KEY}",
        )
        assert status < 500 or status == 501
        assert headers["content-type"]
