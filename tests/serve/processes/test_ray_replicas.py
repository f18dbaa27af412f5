"""Replicas without Ray are refused; with Ray, requests are routed by prefix.
scripts/crash/kill_replica.py tests servers under load.
"""

import asyncio
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.serve.processes.prefix_affinity import rank_replicas
from tests.fixtures.cli import Done, llmcli

__all__ = ["llmcli"]
Llmcli = Callable[..., Done]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_names_the_extra(llmcli: Llmcli, tmp_path: Any) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('"hello"\n')
    for arguments in (
        ("serve", "x.gguf", "--port", "0", "--replicas", "2"),
        ("serve", "x.gguf", "--port", "0", "--ray", "local"),
        ("batch", "x.gguf", str(lines), "-o", str(tmp_path / "out.jsonl"), "--ray", "local"),
    ):
        done = llmcli(*arguments)
        assert done.code == 1
        assert "Ray is not installed\nhint: pip install 'llmcli[ray]'" in done.err


def test_options_that_replicas_do_not_support_are_refused(llmcli: Llmcli, tmp_path: Any) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('"hello"\n')
    batch = (
        "batch",
        "x.gguf",
        str(lines),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--ray",
        "local",
        "--rpc",
        "a",
    )
    for arguments, message in (
        (
            ("serve", "x.gguf", "--port", "0", "--replicas", "2", "--rpc", "a"),
            "an RPC worker serves one client",
        ),
        (
            ("serve", "x.gguf", "--port", "0", "--ray", "ray://a:1"),
            "a Ray client address cannot serve",
        ),
        (batch, "an RPC worker serves one client"),
    ):
        done = llmcli(*arguments)
        assert done.code == 2
        assert message in done.err


def test_batch_replicas_need_a_ray_address(llmcli: Llmcli) -> None:
    done = llmcli("batch", "x.gguf", "in.jsonl", "-o", "out.jsonl", "--replicas", "2")
    assert done.code == 2
    assert "--ray ADDRESS" in done.err


@pytest.mark.filterwarnings("ignore")  # Ray warns when it is imported
def test_the_router_prefers_the_replica_of_the_prefix() -> None:
    pytest.importorskip("ray")
    from llmcli.serve.processes.ray_replicas import PrefixRouter

    replicas: list[Any] = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"
    ]

    def choose(key: bytes, candidates: list[Any]) -> list[list[str]]:
        pending: Any = SimpleNamespace(kwargs={"key": key})
        groups = asyncio.run(
            PrefixRouter.choose_replicas(object.__new__(PrefixRouter), candidates, pending)
        )
        return [[replica.replica_id.unique_id for replica in group] for group in groups]

    order = rank_replicas(b"key", "abc")
    assert choose(b"key", replicas) == [order[:1], order[1:]]
    assert choose(b"key", replicas[::-1]) == [order[:1], order[1:]]
    assert choose(b"", replicas) == [["a", "b", "c"]]


@pytest.mark.filterwarnings("ignore")  # Ray warns when it is imported
def test_a_running_answer_is_changed_in_the_replica_that_has_it() -> None:
    pytest.importorskip("ray")
    from llmcli.serve.processes.ray_replicas import Replicas

    statuses = {"a": 404, "b": 200, "c": 404}

    class Handle:
        """A handle of replicas that answer with their statuses."""

        def options(self, **_: Any) -> Any:
            return self

        def broadcast(self, method: str, scope: Any, body: bytes) -> Any:
            answers = [
                (name, [{"type": "http.response.start", "status": status, "replica": name}])
                for name, status in statuses.items()
            ]
            return SimpleNamespace(results=lambda timeout_s: answers)

    async def change() -> str:
        scope = {"path": "/v1/chat/completions/control", "method": "POST"}
        (message,) = [message async for message in Replicas(Handle()).ask(scope, b"{}", b"")]
        return f"{message['replica']} {message['status']}"

    assert asyncio.run(change()) == "b 200"
    statuses["b"] = 404
    assert asyncio.run(change()) == "a 404"
