"""`llmcli bench phases` on a tiny real model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


def test_the_shares_of_the_phases_add_up_to_1(llmcli: Llmcli, stories_gguf: Path) -> None:
    words = ("-p", "64", "-n", "4", "-r", "2", "-t", "1", "--json")
    document = json.loads(llmcli("bench", "phases", str(stories_gguf), *words).out)
    assert list(document["phases"]) == [
        "tokenize",
        "prefill",
        "decode",
        "sample",
        "detokenize",
        "screen",
        "python",
    ]
    assert sum(times["share"] for times in document["phases"].values()) == pytest.approx(1)
    assert sum(times["answer_ms"]["p50"] for times in document["phases"].values()) == pytest.approx(
        document["answer_ms"]
    )
    assert len(document["answers"]) == 2
    assert all(value > 0 for times in document["answers"] for value in times.values())
    assert (document["generated_tokens"], document["threads"]) == (4, 1)
    assert 30 < document["prompt_tokens"] <= 64


def test_the_printed_result_is_a_table_without_the_generated_text(
    llmcli: Llmcli, stories_gguf: Path
) -> None:
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


def test_invalid_arguments_are_an_error_without_output(llmcli: Llmcli, stories_gguf: Path) -> None:
    for words, message in (
        (["-t", "0"], "--threads"),
        (["-ctk", "q9"], "cache type"),
        (["-fa", "x"], "flash"),
    ):
        done = llmcli("bench", "phases", str(stories_gguf), *words)
        assert (done.code, done.out) == (1, "")
        assert message in done.err
