"""Replicas without Ray: the refusal. With it: who is asked first. Servers under load are
scripts/crash/kill_replica.py's.
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
def test_without_ray_the_extra_is_named(llmcli: Llmcli, tmp_path: Any) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('"hello"\n')
    for words in (
        ("serve", "x.gguf", "--port", "0", "--replicas", "2"),
        ("serve", "x.gguf", "--port", "0", "--ray", "local"),
        ("batch", "x.gguf", str(lines), "-o", str(tmp_path / "out.jsonl"), "--ray", "local"),
    ):
        done = llmcli(*words)
        assert done.code == 1
        assert "Ray is not installed\nhint: pip install 'llmcli[ray]'" in done.err


def test_what_replicas_do_not_have(llmcli: Llmcli, tmp_path: Any) -> None:
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
    for words, message in (
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
        done = llmcli(*words)
        assert done.code == 2
        assert message in done.err


def test_replicas_of_a_batch_need_a_cluster(llmcli: Llmcli) -> None:
    done = llmcli("batch", "x.gguf", "in.jsonl", "-o", "out.jsonl", "--replicas", "2")
    assert done.code == 2
    assert "--ray ADDRESS" in done.err


@pytest.mark.filterwarnings("ignore")  # what Ray itself warns of at its import
def test_a_prompt_goes_where_its_beginning_is() -> None:
    pytest.importorskip("ray")
    from llmcli.serve.processes.ray_replicas import PrefixRouter

    replicas: list[Any] = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"
    ]

    def asked(key: bytes, those: list[Any]) -> list[list[str]]:
        pending: Any = SimpleNamespace(kwargs={"key": key})
        found = asyncio.run(
            PrefixRouter.choose_replicas(object.__new__(PrefixRouter), those, pending)
        )
        return [[one.replica_id.unique_id for one in rank] for rank in found]

    order = rank_replicas(b"key", "abc")
    assert asked(b"key", replicas) == [order[:1], order[1:]]
    assert asked(b"key", replicas[::-1]) == [order[:1], order[1:]]
    assert asked(b"", replicas) == [["a", "b", "c"]]
