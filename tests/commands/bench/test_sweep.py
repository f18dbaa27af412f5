"""`llmcli bench REF` with --threads-sweep, --fa-sweep, --kv-sweep and --ubatch-sweep on a tiny
model.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the memory bandwidth, so that no buffer is read."""
    monkeypatch.setattr(memory_bandwidth, "buffer_sizes", lambda cache, available: [64])
    monkeypatch.setattr(
        memory_bandwidth,
        "measure_bandwidth",
        lambda size, threads: BandwidthReading(size, threads, (1e10,)),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=128, layers=2)


def test_a_sweep_measures_each_value_and_ranks_them(llmcli: Llmcli, model: Path) -> None:
    done = llmcli("bench", str(model), "--fa-sweep", "-p", "8", "-n", "2", "-t", "1", "-r", "2")
    assert done.code == 0
    assert "of the fastest" in done.out
    assert done.out.count("too few rounds") == 2  # of the slower value, in each of the two tests
    done = llmcli(
        "bench", str(model), "--fa-sweep", "-p", "8", "-n", "0", "-t", "1", "-r", "2", "--json"
    )
    assert [(row["flash_attn"], len(row["samples_ns"])) for row in json.loads(done.out)] == [
        (1, 2),
        (0, 2),
    ]


def test_two_sweeps_measure_every_valid_combination(llmcli: Llmcli, model: Path) -> None:
    words = [
        "--ubatch-sweep",
        "--kv-sweep",
        "-p",
        "128",
        "-n",
        "0",
        "-fa",
        "off",
        "-t",
        "1",
        "-r",
        "1",
        "--json",
    ]
    rows = json.loads(llmcli("bench", str(model), *words).out)
    assert {(row["n_ubatch"], row["type_k"], row["type_v"]) for row in rows} == {
        (size, cache_type, cache_type)
        for size in (64, 128)
        for cache_type in ("f32", "f16", "bf16")
    }  # without flash attention V cannot be quantized


def test_a_micro_batch_sweep_measures_only_the_prompt(llmcli: Llmcli, model: Path) -> None:
    words = ["-t", "1", "-r", "1", "--json", "-p", "128"]
    rows = json.loads(llmcli("bench", str(model), "--ubatch-sweep", *words).out)
    assert [(row["n_prompt"], row["n_gen"], row["n_ubatch"]) for row in rows] == [
        (128, 0, 64),
        (128, 0, 128),
    ]


def test_a_sweep_refuses_values_of_the_same_option(llmcli: Llmcli, model: Path) -> None:
    for words in (
        ("--threads-sweep", "-t", "1"),
        ("--kv-sweep", "-ctv", "q8_0"),
        ("--fa-sweep", "-fa", "on"),
    ):
        done = llmcli("bench", str(model), *words)
        assert (done.code, done.out) == (2, "")
        assert words[0] in done.err
