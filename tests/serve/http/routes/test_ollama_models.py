"""ollama's endpoints that change the models of a server."""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from tests.fixtures.server import Served


def send(served: Served, path: str, method: str = "POST", **body: Any) -> httpx.Response:
    return httpx.request(method, f"{served.url}{path}", json=body)


@pytest.mark.parametrize("field", ["model", "name"])
@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_the_served_model_is_pulled_at_once(
    serve: Callable[..., Served], field: str, name: str
) -> None:
    served = serve()
    lines = [
        httpx.Response(200, text=line).json()
        for line in send(served, "/api/pull", **{field: name}).text.splitlines()
    ]
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-1] == {"status": "success"}
    found = send(served, "/api/pull", stream=False, **{field: name}).json()
    assert found == {"status": "success"}


@pytest.mark.parametrize(
    ("path", "method", "body", "status", "message"),
    [
        ("/api/pull", "POST", {"model": "qwen3:8b"}, 404, "llmcli serve qwen3:8b"),
        ("/api/pull", "POST", {}, 400, "name is missing"),
        ("/api/create", "POST", {"model": "mine", "from": "tiny"}, 501, "llmcli quantize"),
        (
            "/api/copy",
            "POST",
            {"source": "tiny", "destination": "other"},
            501,
            "llmcli serve tiny --alias NEW",
        ),
        ("/api/push", "POST", {"model": "tiny"}, 501, "upload"),
        ("/api/delete", "DELETE", {"model": "tiny"}, 501, "llmcli rm tiny"),
        ("/api/delete", "DELETE", {"model": "other"}, 404, "model 'other' not found"),
        ("/api/blobs/sha256:00", "POST", {}, 501, "stores no blobs"),
    ],
)
def test_everything_else_is_refused_with_what_to_do(
    serve: Callable[..., Served],
    path: str,
    method: str,
    body: dict[str, Any],
    status: int,
    message: str,
) -> None:
    answer = send(serve(), path, method, **body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}  # as ollama's clients expect
    assert message in answer.json()["error"]


def test_no_blob_is_here(serve: Callable[..., Served]) -> None:
    assert httpx.head(f"{serve().url}/api/blobs/sha256:00").status_code == 404
