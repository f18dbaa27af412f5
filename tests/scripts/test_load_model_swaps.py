"""The load on a server of several models: its flags and its checks."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from scripts.load import model_swaps
from scripts.load.model_swaps import Tally


def test_flags_of_serve_follow_two_dashes() -> None:
    args, flags = model_swaps.parse_words(["a.gguf", "--requests", "5", "--", "-np", "2", "x"])
    assert (args.files, args.requests, flags) == ([Path("a.gguf")], 5, ["-np", "2", "x"])
    assert model_swaps.parse_words(["a.gguf"])[1] == []
    with pytest.raises(SystemExit):
        model_swaps.parse_words(["--wrong"])


def test_a_run_whose_memory_was_never_read_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_swaps.print_result(Tally(most_bytes=1), None) == 0
    assert model_swaps.print_result(Tally(most_bytes=2), 1) == 1
    assert model_swaps.print_result(Tally(), None) == 1
    assert "never read" in capsys.readouterr().out


def test_a_failure_of_the_watcher_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise LookupError("memory")

    async def pause(*_: Any) -> str:
        await asyncio.sleep(0)
        return ""

    monkeypatch.setattr(model_swaps, "watch_memory", fail)
    monkeypatch.setattr(model_swaps, "answer", pause)
    args = argparse.Namespace(
        seed=0,
        at_once=1,
        forms="chat",
        requests=2,
        seconds=60.0,
        cancelled=0.0,
        killed=0.0,
        rounds=1,
    )
    with pytest.raises(LookupError, match="memory"):
        asyncio.run(model_swaps.send_load(args, "http://127.0.0.1:9", 0, ["m"]))
