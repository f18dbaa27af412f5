"""scripts/fuzz/websocket_grpc.py: a short run against a test server."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from scripts.fuzz import websocket_grpc
from tests.fixtures.server import CHAT, Served, serving


@pytest.fixture
def tiny(stories_gguf: Path) -> Iterator[Served]:
    """A server of stories260K over HTTP and gRPC, with a context that is large enough for tools."""
    pytest.importorskip("grpc")
    options = RunOptions(ctx_size=2048, threads=1, threads_batch=1)
    with open_runner(stories_gguf, options, template=CHAT, slots=8, placement=ON_HOST) as runner:
        with serving(runner, max_answer_tokens=8, grpc_port=0) as served:
            yield served


def test_wrong_requests_are_answered_or_refused(tiny: Served) -> None:
    requests = websocket_grpc.cases()
    random.Random(3).shuffle(requests)
    counts, failures = asyncio.run(
        websocket_grpc.fuzz_all_interfaces(tiny.url, tiny.server.grpc_port, requests[:30], 3)
    )
    assert failures == []
    assert {"socket done", "socket invalid_request_error", "GET 200", "GET 404", "FROB 405"} <= set(
        counts
    ), counts
    assert {"Generate OK", "Generate INVALID_ARGUMENT", "Embed INVALID_ARGUMENT"} <= set(counts), (
        counts
    )


def test_values_that_a_message_cannot_hold_are_skipped() -> None:
    pytest.importorskip("grpc")
    for seed in range(4):  # the values include 10**400, which is too large for a double
        assert len(list(websocket_grpc.grpc_messages(random.Random(seed), 200))) >= 600
