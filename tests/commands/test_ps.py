"""`llmcli ps` with servers that report anything."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.fixtures.cli import Done

HUGE = 10**400
REPORT = {"state": "loaded", "bytes": 3 << 20, "running": 1, "waiting": 2, "expires_ms": 60_000}
NO_NUMBERS = {
    "bytes": HUGE,
    "running": "many",
    "waiting": -1,
    "idle_ms": True,
    "expires_ms": 1.5,
    "planned": [],
    "cache": {"outside": "x", "allocated_bytes": {}, "cells": None},
    "state": "loaded",
    "error": {"a": 1},
}


@pytest.fixture
def report() -> Iterator[Callable[[Any, Any], str]]:
    """A function that starts a server with these reports of models and memory, and returns its URL."""
    with ExitStack() as stack:

        def start(models: Any, memory: Any) -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    body = json.dumps({"/v1/models": models, "/v1/kv": memory}[self.path]).encode()
                    self.send_response(200)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *words: Any) -> None:
                    pass

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


@pytest.mark.parametrize(
    "memory",
    [
        {"models": {"a": NO_NUMBERS}, "limit_bytes": HUGE},
        {"models": {"a": []}, "limit_bytes": "1", "reserved_bytes": None},
        {"models": [], "limit_bytes": 1 << 20},
        {"outside": 5, "running": [], "cells": HUGE},
    ],
)
def test_a_report_with_wrong_values_is_shown_without_them(
    llmcli: Callable[..., Done], report: Callable[[Any, Any], str], memory: dict[str, Any]
) -> None:
    url = report({"data": [{"id": "a", "meta": 5}]}, memory)
    done = llmcli("ps", url, "--json")
    assert done.code == 0
    (row,) = json.loads(done.out)["models"]
    assert row["model"] == "a"
    assert row["memory_bytes"] is row["running"] is row["idle_ms"] is row["n_ctx"] is None
    table = llmcli("ps", url)
    assert table.code == 0
    assert table.out.splitlines()[1].split()[0] == "a"


def test_control_characters_of_a_server_are_not_printed(
    llmcli: Callable[..., Done], report: Callable[[Any, Any], str]
) -> None:
    error = "\x1b]0;title\x07 bad"
    memory = {"models": {"\x1b[31mred": {**REPORT, "error": error}}, "limit_bytes": 4 << 20}
    done = llmcli("ps", report({"data": [{"id": "\x1b[31mred"}]}, memory))
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "3.0 MiB" in done.out
    assert "1 + 2" in done.out
    assert "0 B of 4.0 MiB are taken" in done.out


@pytest.mark.parametrize("models", [{}, {"data": 5}, {"data": ["a"]}])
def test_another_server_is_an_error(
    llmcli: Callable[..., Done], report: Callable[[Any, Any], str], models: Any
) -> None:
    done = llmcli("ps", report(models, {}))
    assert done.code == 1
    assert "it is no server of llmcli" in done.err
