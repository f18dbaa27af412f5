from dataclasses import replace

import pytest

from llmcli.chat.display.answer_report import build_document, format_timing, used_cache_bytes
from llmcli.runtime.kv_size import KVCache, LayerKV
from llmcli.runtime.requests.request import Answer
from llmcli.types import TokenTime
from tests.fixtures.fakes import fake_runner

TOKENS = tuple(
    TokenTime(n, "x", ms, ms / 2, ms / 4, -0.5) for n, ms in enumerate([100.0, 10.0, 20.0, 30.0])
)
ANSWER = Answer("xxxx", TOKENS, "stop", 12, 4, 80.0, 7)


@pytest.fixture
def runner():
    return fake_runner()


def test_the_figures_of_the_document(runner) -> None:
    document = build_document(runner, "name", 5, ANSWER)
    assert document["model"] == {
        "name": "name",
        "path": str(runner.header.path),
        "file_bytes": 5,
        "file_type": "F32",
        "parameters": 64 * 260,
    }
    assert document["timing"] == {
        "load_ms": 1.0,
        "prompt_tokens": 12,
        "cached_tokens": 4,
        "prompt_ms": 80.0,
        "prompt_per_second": 100.0,
        "ttft_ms": 100.0,
        "ttfo_ms": 100.0,
        "thinking_tokens": 0,
        "generated_tokens": 4,
        "generate_ms": 60.0,
        "tokens_per_second": 50.0,
        "tpot_ms": 20.0,
        "itl_ms": {"p50": 20.0, "p90": 30.0, "p95": 30.0, "p99": 30.0, "max": 30.0},
    }


@pytest.mark.parametrize("count", [0, 1])
def test_an_answer_without_gaps_has_zeros(runner, count: int) -> None:
    timing = build_document(runner, "name", 5, replace(ANSWER, tokens=TOKENS[:count]))["timing"]
    assert timing["itl_ms"] == {"p50": 0.0, "p90": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    assert (timing["tpot_ms"], timing["tokens_per_second"]) == (0.0, 0.0)


def test_the_timing_line(runner) -> None:
    assert format_timing(runner, ANSWER) == (
        "[ttft 100 ms · prefill 8 tok 100 tok/s (+4 reused) · 4 tok 50.0 tok/s · p50 20.0 p99 30.0 ms"
        " · KV 0/256 cells 0 B of 128.0 KiB]"
    )
    assert format_timing(runner, replace(ANSWER, finish="cancelled")).endswith(
        "(stopped by the user)"
    )


def test_a_layer_with_a_window_counts_at_most_its_own_cells() -> None:
    cache = KVCache(
        (LayerKV(0, 1024, 1024 * 10, 1024 * 10), LayerKV(1, 256, 256 * 2, 256 * 2)), 1024, 24
    )
    assert used_cache_bytes(cache, 100) == 100 * 24
    assert used_cache_bytes(cache, 1000) == 1000 * 20 + 256 * 4
