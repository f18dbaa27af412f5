"""Requests of clients and agents get an answer, or an error that says what to do.

A line of requests.jsonl is a path, a body, and the status of the response. `is` has values in the
response by their paths; `contains` is a part of its text.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.fixtures.server import Served

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "requests.jsonl").read_text("utf-8").splitlines()
]


def value_at(document: Any, path: str) -> Any:
    """Return the value at a path such as `choices.0.text`."""
    for key in path.split("."):
        document = document[int(key) if isinstance(document, list) else key]
    return document


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_request_is_answered(
    case: dict[str, Any], serve: Callable[..., Served], tiny: Served
) -> None:
    served = tiny if case["path"] == "/api/embed" else serve(n_ctx=4096)
    response = httpx.post(served.url + case["path"], json=case["body"])
    assert response.status_code == case["status"], response.text
    for path, value in case.get("is", {}).items():
        assert value_at(response.json(), path) == value, response.text
    assert case.get("contains", "") in response.text
