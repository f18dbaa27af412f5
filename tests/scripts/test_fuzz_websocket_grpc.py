"""Some requests of scripts/fuzz/websocket_grpc.py on a server of the test's own: the WebSocket, gRPC, paths
that are read.
"""

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from tests.fixtures.server import CHAT, Served, serving

SCRIPTS = Path(__file__).parents[2] / "scripts" / "fuzz"


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import websocket_grpc as fuzz_doors

    yield fuzz_doors
    for name in ("fuzz_doors", "fuzz_requests"):
        sys.modules.pop(name, None)


@pytest.fixture
def tiny(stories_gguf: Path) -> Iterator[Served]:
    """stories260K, with room for tools, over HTTP and gRPC."""
    pytest.importorskip("grpc")
    options = RunOptions(ctx_size=2048, threads=1, threads_batch=1)
    with open_runner(stories_gguf, options, template=CHAT, slots=8, gpu_layers=0) as runner:
        with serving(runner, most_tokens=8, grpc_port=0) as served:
            yield served


def test_nothing_wrong_at_any_door(tiny: Served, doors: ModuleType) -> None:
    asked = doors.cases()
    random.Random(3).shuffle(asked)
    counts, found = asyncio.run(doors.all_doors(tiny.url, tiny.server.grpc_port, asked[:30], 3))
    assert found == []
    assert {"socket done", "socket invalid_request_error", "GET 200", "GET 404", "FROB 405"} <= set(
        counts
    ), counts
    assert {"Generate OK", "Generate INVALID_ARGUMENT", "Embed INVALID_ARGUMENT"} <= set(counts), (
        counts
    )


def test_what_a_message_cannot_carry_is_left_out(doors: ModuleType) -> None:
    pytest.importorskip("grpc")
    for seed in range(4):  # 10**400, which is no double, among the values
        assert len(list(doors.messages(random.Random(seed), 200))) >= 600
