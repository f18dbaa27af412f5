"""scripts/fuzz/http_requests.py: a short run against a test server, and the check of answers."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.serve.http.routes import ROUTES
from scripts.fuzz import http_requests
from tests.fixtures.server import CHAT, Served, serving
from tests.serve.http.test_errors import post


@pytest.fixture(scope="module")
def tiny(stories_gguf: Path) -> Iterator[Served]:
    """A server of stories260K with a context that is large enough for tools."""
    options = RunOptions(ctx_size=2048, threads=1, threads_batch=1)
    with open_runner(stories_gguf, options, template=CHAT, slots=8, placement=ON_HOST) as runner:
        with serving(runner, max_answer_tokens=8) as served:
            yield served


def test_every_path_with_a_body_has_a_request() -> None:
    post_paths = {route.path for route in ROUTES.values() if "POST" in route.methods}
    assert post_paths - {path for path, _ in http_requests.VALID + http_requests.REFUSED} == set()


def test_unchanged_requests_are_answered(tiny: Served) -> None:
    requests = [(path, http_requests.encode(body)) for path, body in http_requests.VALID]
    counts, failures = asyncio.run(http_requests.fuzz(tiny.url, requests, 4))
    assert failures == []
    assert {label.split()[1] for label in counts} == {"200"}, counts


def test_requests_with_one_wrong_value_are_answered_or_refused(tiny: Served) -> None:
    requests = http_requests.cases()
    random.Random(5).shuffle(requests)
    counts, failures = asyncio.run(http_requests.fuzz(tiny.url, requests[:150], 8))
    assert failures == []
    assert sum(counts.values()) == 150


def test_wrong_answers_are_reported() -> None:
    error = {"message": "m", "type": "t", "param": None, "code": None}
    assert http_requests.find_problem("/", 400, json.dumps({"error": error}).encode()) == ""
    for status, raw in (
        (500, json.dumps({"error": error}).encode()),
        (200, b'{"a": NaN}'),
        (400, b"no"),
        (200, b'data: {"error": {"message": "x"}}\n\n'),
    ):
        assert http_requests.find_problem("/", status, raw), (status, raw)


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "schema",
    [
        f'{{"const": {HUGE}}}',
        f'{{"required": [{{"x": {HUGE}}}]}}',
        f'{{"maximum": {HUGE}}}',
        f'{{"minLength": {HUGE}}}',
    ],
)
def test_too_large_numbers_in_a_schema_are_refused(tiny: Served, schema: str) -> None:
    status, _, document = post(
        tiny, f'{{"prompt": "x", "json_schema": {schema}}}'.encode(), "/v1/completions"
    )
    assert (status, document["error"]["param"]) == (400, "json_schema"), document
