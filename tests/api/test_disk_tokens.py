"""Every API tells how many tokens of a prompt were read from the prefix cache on disk."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai.types import CompletionUsage
from openai.types.responses import Response

from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.open_disk_cache import open_disk_cache
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from tests.fixtures.server import CHAT, Served, serving

STORY = "once upon a time there was a little girl who had a red ball. " * 3
MIN_TOKENS = 48  # fewer than the full blocks of a prompt, whose first tokens others share
# a path -> where its final object has the cached tokens (None: nowhere), and those from the disk
PLACES: dict[str, tuple[str | None, str]] = {
    "/v1/chat/completions": (
        "usage.prompt_tokens_details.cached_tokens",
        "usage.prompt_tokens_details.disk_tokens",
    ),
    "/v1/completions": (
        "usage.prompt_tokens_details.cached_tokens",
        "usage.prompt_tokens_details.disk_tokens",
    ),
    "/v1/responses": (
        "usage.input_tokens_details.cached_tokens",
        "usage.input_tokens_details.disk_tokens",
    ),
    "/v1/messages": ("usage.cache_read_input_tokens", "usage.disk_tokens"),
    "/api/chat": (None, "disk_tokens"),
    "/api/generate": (None, "disk_tokens"),
    "/completion": ("tokens_cached", "disk_tokens"),
}
CASES = [(path, is_streamed) for path in PLACES for is_streamed in (False, True)]


@contextmanager
def serve_cached(model: Path, folder: Path, **settings: Any) -> Iterator[Served]:
    """Serve a model with a prefix cache in `folder`. `settings`: fields of ServerSettings."""
    options = RunOptions(ctx_size=1024, threads=1, gemm="ggml")
    lines: list[str] = []
    with open_runner(model, options, template=CHAT, slots=2, placement=ON_HOST) as runner:
        runner.engine.schedule = replace(runner.engine.schedule, host_bytes=1 << 28)
        with (
            open_disk_cache(runner, folder, 1 << 30, lines.append),
            serving(runner, **settings) as served,
        ):
            yield served
    assert not lines


def request_body(path: str, is_streamed: bool) -> dict[str, Any]:
    """Return a request whose prompt no other request begins with."""
    text = f"{sorted(PLACES).index(path)} {is_streamed} {STORY}"
    shape: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    if path == "/v1/responses":
        shape = {"input": text, "max_output_tokens": 2}
    elif path in ("/completion", "/v1/completions", "/api/generate"):
        shape = {"prompt": text, "max_tokens": 2}
    if path.startswith("/api/"):
        del shape["max_tokens"]
        shape["options"] = {"num_predict": 2}
    if path in ("/v1/chat/completions", "/v1/completions") and is_streamed:
        shape["stream_options"] = {"include_usage": True}
    return {"model": "tiny", "stream": is_streamed, **shape}


def final_object(url: str, path: str, is_streamed: bool) -> dict[str, Any]:
    """Send a request, and return the object of the response that has the token counts."""
    response = httpx.post(url + path, json=request_body(path, is_streamed), timeout=60)
    assert response.status_code == 200, response.text
    if not is_streamed:
        return dict(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    if path == "/v1/messages":
        (found,) = [each for each in objects if each["type"] == "message_delta"]
        return dict(found)
    last = objects[-1]
    return dict(last["response"] if path == "/v1/responses" else last)


def value_at(document: Any, place: str) -> Any:
    """Return a value by its dotted name, or None."""
    for name in place.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


@pytest.fixture(scope="module")
def ask_restarted(
    stories_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, bool], dict[str, Any]]]:
    """A server that finds the prompts of all cases on the disk. A case that is repeated gets the
    first response again, because its prompt would then be found in memory.
    """
    folder = tmp_path_factory.mktemp("cache")
    with serve_cached(stories_gguf, folder) as served:
        for path, is_streamed in CASES:
            final = final_object(served.url, path, is_streamed)
            assert value_at(final, PLACES[path][1]) is None, (path, final)
    with serve_cached(stories_gguf, folder) as served:
        yield cache(partial(final_object, served.url))


@pytest.mark.parametrize(("path", "is_streamed"), CASES)
def test_tokens_from_the_disk_are_counted(
    ask_restarted: Callable[[str, bool], dict[str, Any]], path: str, is_streamed: bool
) -> None:
    final = ask_restarted(path, is_streamed)
    cached_place, disk_place = PLACES[path]
    n_disk = value_at(final, disk_place)
    assert n_disk is not None, final
    assert n_disk >= MIN_TOKENS, final
    if cached_place:
        assert n_disk <= value_at(final, cached_place)
    if path == "/v1/responses":
        usage = Response.model_validate(final).usage
        assert usage is not None
        assert usage.input_tokens_details.to_dict()["disk_tokens"] == n_disk
    elif disk_place.startswith("usage.prompt"):
        details = CompletionUsage.model_validate(final["usage"]).prompt_tokens_details
        assert details is not None
        assert details.to_dict()["disk_tokens"] == n_disk


def test_tokens_from_the_disk_are_counted_in_grpc(stories_gguf: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("google.protobuf")
    from tests.serve.grpc.test_service import MESSAGE_CLASSES, open_stub

    request = MESSAGE_CLASSES["GenerateRequest"](prompt=STORY, max_tokens=2, temperature=0.0)
    usages = []
    for _ in range(2):
        with serve_cached(stories_gguf, tmp_path, grpc_port=0) as served, open_stub(served) as stub:
            usages.append(list(stub.Generate(request))[-1].usage)
    assert usages[0].disk_tokens == 0
    assert MIN_TOKENS <= usages[1].disk_tokens <= usages[1].cached_tokens
