"""The fields return_progress and timings_per_token of llama-server."""

import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.runner import Runner
from tests.fixtures.server import Served, serving

TEXT = "Once upon a time there was a little girl called Lily. " * 12
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": TEXT, "n_predict": 6},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 6},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 6},
}


def stream(served: Served, path: str, **more: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    body = {**BODIES[path], "stream": True, "ignore_eos": True, **more}
    answer = httpx.post(served.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture
def served(stories_runner: Runner) -> Any:
    """A server that computes at most 64 rows of a prompt at once."""
    schedule = stories_runner.engine.schedule
    with serving(stories_runner) as running:
        stories_runner.engine.schedule = Schedule(4, max_chunk_rows=64)
        try:
            yield running
        finally:
            stories_runner.engine.schedule = schedule


@pytest.mark.parametrize("path", BODIES)
def test_the_progress_of_the_prompt_is_streamed(served: Served, path: str) -> None:
    marker = f"{path} is another beginning. "
    key = next(name for name in BODIES[path] if name in ("prompt", "input", "messages"))
    value = BODIES[path][key]
    text = marker + TEXT
    body = {key: [{"role": "user", "content": text}] if isinstance(value, list) else text}
    first, again = (
        [
            chunk["prompt_progress"]
            for chunk in stream(served, path, return_progress=True, **body)
            if "prompt_progress" in chunk
        ]
        for _ in range(2)
    )
    assert len(first) > 3
    total = first[0]["total"]
    assert first[0]["processed"] == first[0]["cache"] < total
    processed = [item["processed"] for item in first]
    assert processed == sorted(set(processed)) and processed[-1] == total
    assert {(item["total"], item["cache"]) for item in first} == {(total, first[0]["cache"])}
    # the second time all of the prompt but its last token is in the cache
    assert [(item["cache"], item["processed"]) for item in again] == [
        (total - 1, total - 1),
        (total - 1, total),
    ]


@pytest.mark.parametrize("path", BODIES)
def test_nothing_is_added_without_the_fields(served: Served, path: str) -> None:
    *chunks, last = stream(served, path)
    assert not any(chunk.keys() & {"prompt_progress", "timings"} for chunk in chunks)
    assert "prompt_progress" not in last
    assert ("timings" in last) is (path != "/v1/responses")


@pytest.mark.parametrize("path", BODIES)
def test_timings_of_each_token(served: Served, path: str) -> None:
    chunks = stream(served, path, timings_per_token=True)
    timings = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    assert len(timings) >= 6
    assert "timings" in chunks[-1]
    counts = [item["predicted_n"] for item in timings]
    assert counts == sorted(counts) and counts[-1] == 6
    for item in timings:
        assert all(value >= 0 for value in item.values())
        assert (item["predicted_per_second"] == 0) == (item["predicted_n"] < 2)
    assert timings[0]["prompt_n"] + timings[0]["cache_n"] > 0


def test_both_together_begin_before_the_first_pass(served: Served) -> None:
    chunks = stream(
        served,
        "/completion",
        prompt=f"both {TEXT}",
        return_progress=True,
        timings_per_token=True,
    )
    first, *others = [chunk["timings"] for chunk in chunks if "prompt_progress" in chunk]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"]) == (0, 0.0, 0)
    assert others and others[-1]["prompt_ms"] > 0


def test_openais_client_gets_its_usage_with_timings(served: Served) -> None:
    api = OpenAI(base_url=served.v1, api_key="any")
    *_, last = api.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"timings_per_token": True, "ignore_eos": True},
    )
    assert last.usage is not None and last.usage.completion_tokens == 5
    extra = last.model_extra or {}
    assert extra["timings"]["predicted_n"] == 5


def test_a_complete_answer_needs_neither(serve: Callable[..., Served]) -> None:
    body = {**BODIES["/v1/completions"], "prompt": "a", "return_progress": True}
    answer = httpx.post(f"{serve().v1}/completions", json={**body, "timings_per_token": True})
    assert answer.status_code == 200 and "timings" in answer.json()
