"""`llmcli bench roofline` on a tiny model, with a fake memory bandwidth."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from llmcli.hardware import host
from llmcli.runtime.binding.kernels import products
from quant.quantize import plan, write
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a memory bandwidth of 10 GB/s for all threads and a last-level cache of 16 bytes, and
    shorten the prompts.
    """
    monkeypatch.setattr(host, "last_cache_bytes", lambda: 16)
    monkeypatch.setattr(memory_bandwidth, "buffer_sizes", lambda cache, available: [64, 256])
    monkeypatch.setattr(
        memory_bandwidth,
        "measure_bandwidth",
        lambda size, threads, *how: BandwidthReading(size, threads, (8e9, 1e10)),
    )
    monkeypatch.setattr("llmcli.bench.roofline.PROMPT_TOKENS", 16)
    monkeypatch.setattr("llmcli.bench.roofline.GENERATED_TOKENS", 4)
    monkeypatch.setattr("llmcli.bench.cost.weight_kernels.MIN_BYTES", 1 << 18)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=128, layers=2)


def test_the_figures_are_consistent(llmcli: Llmcli, model: Path) -> None:
    done = llmcli("bench", "roofline", str(model), "-d", "0,32", "-r", "1", "-t", "1", "--json")
    document = json.loads(done.out)
    assert document["read_bandwidth_bytes_per_second"] == 1e10
    assert [row["n_depth"] for row in document["decode"]] == [0, 32]
    for row in document["decode"]:
        assert row["bytes_per_token"] == sum(row["weights_bytes"].values()) + row["kv_bytes"]
        assert row["attainable_tokens_per_second"] == pytest.approx(1e10 / row["bytes_per_token"])
        assert row["roofline_fraction"] == pytest.approx(
            row["tokens_per_second"] / row["attainable_tokens_per_second"]
        )
        assert row["intensity"] == pytest.approx(
            row["operations_per_token"] / row["bytes_per_token"]
        )
    ridge = document["prefill"]["ridge_operations_per_byte"]
    assert ridge == pytest.approx(document["prefill"]["operations_per_second"] / 1e10)


def test_the_speed_of_every_type_of_weights_is_measured(llmcli: Llmcli, tmp_path: Path) -> None:
    source = tiny_gguf.llama(tmp_path / "f32.gguf", hidden=256, layers=1)
    path = tmp_path / "q4_k_m.gguf"
    write.write_model(plan.plan_quantization(write.open_gguf(source), "Q4_K_M"), path, threads=1)
    words = ("bench", "roofline", str(path), "-r", "1", "-t", "1")
    found = {row["type"]: row for row in json.loads(llmcli(*words, "--json").out)["weight_kernels"]}
    assert set(found) == set(products.TYPES)
    assert found["Q4_K"]["bits_per_weight"] == 4.5
    assert found["Q4_K"]["model_bytes"] > 0 == found["Q8_0"]["model_bytes"]
    for row in found.values():
        assert row["bytes_per_second"] == row[f"bytes_per_second_{row['kernel']}"] > 0
    printed = llmcli(*words).out
    assert "tok/s if all" in printed
    assert all(name in printed for name in products.TYPES)


def test_the_printed_result_names_bandwidth_and_attainable_speed(
    llmcli: Llmcli, model: Path
) -> None:
    done = llmcli("bench", "roofline", str(model), "-r", "1", "-t", "1")
    assert done.code == 0
    for text in ("memory bandwidth: 10.0 GB/s", "attainable tok/s", "depth 0: "):
        assert text in done.out


def test_the_bandwidth_is_measured_without_a_model(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(json.loads(llmcli("bench", "roofline", "--json").out)) == {
        "cpu_info",
        "last_cache_bytes",
        "read_bandwidth_bytes_per_second",
        "readings",
        "gpus",
        "weight_kernels",
    }
    monkeypatch.setattr(host, "last_cache_bytes", lambda: None)
    assert "the memory bandwidth is unknown" in llmcli("bench", "roofline").out
    assert (
        json.loads(llmcli("bench", "roofline", "--json").out)["read_bandwidth_bytes_per_second"]
        is None
    )


def test_a_noisy_machine_is_a_warning(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        memory_bandwidth,
        "measure_bandwidth",
        lambda size, threads, *how: BandwidthReading(size, threads, (1e9, 1e10)),
    )
    assert "something else uses this machine" in llmcli("bench", "roofline").err


def test_bench_uses_the_saved_bandwidth_of_an_undisturbed_measurement(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llmcli("bench", "roofline")
    monkeypatch.setattr(
        memory_bandwidth,
        "measure_bandwidth",
        lambda size, threads, *how: BandwidthReading(size, threads, (1e9, 2e10)),
    )
    llmcli("bench", "roofline")  # a disturbed measurement, which is not saved
    (row,) = json.loads(
        llmcli("bench", str(model), "-p", "0", "-n", "4", "-r", "1", "-t", "1", "-o", "json").out
    )
    assert row["read_bandwidth_bytes_per_second"] == 1e10


def test_bench_accepts_the_flags_of_llama_bench(llmcli: Llmcli, model: Path) -> None:
    for words in (["-m", str(model), "-p", "8", "-n", "0"], [str(model), "-p", "8", "-n", "0"]):
        rows = json.loads(llmcli("bench", *words, "-r", "1", "-o", "json").out)
        assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(8, 0)]
    assert llmcli("bench").code == 2
    assert "--n-prompt" in llmcli("bench", "--help").out
    assert "--n-depth" in llmcli("bench", "roofline", "--help").out


def test_invalid_arguments_are_an_error_without_output(llmcli: Llmcli, model: Path) -> None:
    for words, message in (
        (["-d", "x"], "-d"),
        (["-ctk", "q9"], "cache type"),
        (["-t", "100000"], "--threads"),
    ):
        done = llmcli("bench", "roofline", str(model), *words)
        assert (done.code, done.out) == (1, "")
        assert message in done.err
