"""`bench phases` on a tiny real model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


def test_shares_add_up_and_every_answer_is_there(llmcli: Llmcli, stories_gguf: Path) -> None:
    words = ("-p", "64", "-n", "4", "-r", "2", "-t", "1", "--json")
    told = json.loads(llmcli("bench", "phases", str(stories_gguf), *words).out)
    assert list(told["phases"]) == [
        "tokenize",
        "prefill",
        "decode",
        "sample",
        "detokenize",
        "screen",
        "python",
    ]
    assert sum(one["share"] for one in told["phases"].values()) == pytest.approx(1)
    assert sum(one["answer_ms"]["p50"] for one in told["phases"].values()) == pytest.approx(
        told["answer_ms"]
    )
    assert len(told["answers"]) == 2
    assert all(value > 0 for one in told["answers"] for value in one.values())
    assert (told["generated_tokens"], told["threads"]) == (4, 1)
    assert 30 < told["prompt_tokens"] <= 64


def test_people_get_a_table_and_none_of_the_text(llmcli: Llmcli, stories_gguf: Path) -> None:
    done = llmcli(
        "bench",
        "phases",
        str(stories_gguf),
        "-p",
        "64",
        "-n",
        "4",
        "-r",
        "1",
        "-t",
        "1",
        "--temp",
        "0",
    )
    assert done.code == 0
    assert "1 thread" in done.out
    assert "other Python code" in done.out
    assert "1 answer of 4" in done.out
    assert len(done.out.splitlines()) == 11


def test_mistakes_are_one_line(llmcli: Llmcli, stories_gguf: Path) -> None:
    for words, why in (
        (["-t", "0"], "--threads"),
        (["-ctk", "q9"], "cache type"),
        (["-fa", "x"], "flash"),
    ):
        done = llmcli("bench", "phases", str(stories_gguf), *words)
        assert (done.code, done.out) == (1, "")
        assert why in done.err
