"""The share of the memory bandwidth that a test uses, and the saved bandwidth."""

from dataclasses import replace

import pytest

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from llmcli.bench.cost.token_cost import token_cost
from llmcli.bench.history.history import History
from llmcli.bench.speed import bandwidth_share
from llmcli.bench.speed.measure import ModelUnderTest, SpeedResult
from llmcli.bench.speed.parameter_grid import SpeedTest as Case
from llmcli.hardware import host
from llmcli.ui import UI
from quant.model_file import read_header
from tests.quant import tiny_gguf

CASE = Case(0, 16, 100, 2048, 512, "f16", "f16", 1, -1, "auto")


def result(case: Case, steps_per_second: float) -> SpeedResult:
    ns = round(case.n_gen / steps_per_second * 1e9)
    return SpeedResult(ModelUnderTest("a.gguf", "llama", 1, 1), case, "", (ns, ns), ())


@pytest.fixture
def header(tmp_path):
    return read_header.read_header(
        tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, ff=128, layers=2, vocab=300)
    )


def test_a_step_reads_the_weights_once_and_every_kv_cache(header):
    cost = token_cost(header, 108)
    weights = sum(cost.weight_bytes.values())
    assert bandwidth_share.bandwidth_share(
        header, result(CASE, 50), 50.0 * (weights + cost.kv_bytes)
    ) == pytest.approx(1)
    parallel = replace(CASE, n_parallel=8)
    assert bandwidth_share.bandwidth_share(
        header, result(parallel, 50), 100.0 * (weights + 8 * cost.kv_bytes)
    ) == pytest.approx(0.5)


def test_the_share_is_none_if_anything_is_unknown(header, tmp_path):
    assert bandwidth_share.bandwidth_share(header, result(CASE, 50), None) is None
    assert (
        bandwidth_share.bandwidth_share(header, result(replace(CASE, n_prompt=8), 50), 1e9) is None
    )
    experts = read_header.read_header(
        tiny_gguf.llama(tmp_path / "e.gguf", hidden=64, ff=128, layers=2, experts=8)
    )
    assert bandwidth_share.bandwidth_share(experts, result(CASE, 50), 1e9)
    assert (
        bandwidth_share.bandwidth_share(experts, result(replace(CASE, n_parallel=2), 50), 1e9)
        is None
    )
    recurrent = read_header.read_header(tiny_gguf.mamba(tmp_path / "r.gguf"))
    assert bandwidth_share.bandwidth_share(recurrent, result(CASE, 50), 1e9) is None


@pytest.fixture
def fake_measurement(monkeypatch):
    """Replace the bandwidth measurement. Returns the list of measured buffer sizes, and the rates
    that the fake measurement returns.
    """
    buffer_sizes: list[int] = []
    rates = [1e10, 0.95e10, 1e10]

    def measure(nbytes, threads, rounds, seconds):
        buffer_sizes.append(nbytes)
        return BandwidthReading(nbytes, threads, tuple(rates))

    monkeypatch.setattr(memory_bandwidth, "measure_bandwidth", measure)
    monkeypatch.setattr(host, "last_cache_bytes", lambda: 32 << 20)
    return buffer_sizes, rates


def test_the_bandwidth_is_measured_once_per_machine_and_on_request(
    tmp_path, fake_measurement, monkeypatch
):
    history, (buffer_sizes, rates) = History(tmp_path / "h.sqlite", UI()), fake_measurement
    assert [bandwidth_share.machine_bandwidth(history, UI()) for _ in range(3)] == [1e10] * 3
    assert buffer_sizes == [256 << 20]
    rates[:] = [2e10]
    assert bandwidth_share.machine_bandwidth(history, UI(), remeasure=True) == 2e10
    assert bandwidth_share.machine_bandwidth(history, UI()) == 2e10
    monkeypatch.setattr(host, "machine_identity", lambda: "another machine")
    assert bandwidth_share.machine_bandwidth(history, UI()) == 2e10
    assert len(buffer_sizes) == 3


def test_a_disturbed_measurement_is_not_saved(tmp_path, fake_measurement):
    history, (buffer_sizes, rates) = History(tmp_path / "h.sqlite", UI()), fake_measurement
    rates[:] = [1e10, 5e9]
    assert [bandwidth_share.machine_bandwidth(history, UI()) for _ in range(2)] == [1e10] * 2
    assert len(buffer_sizes) == 2


def test_without_the_cache_size_the_bandwidth_is_unknown(tmp_path, fake_measurement, monkeypatch):
    history, (buffer_sizes, _) = History(tmp_path / "h.sqlite", UI()), fake_measurement
    monkeypatch.setattr(host, "last_cache_bytes", lambda: None)
    assert bandwidth_share.machine_bandwidth(history, UI()) is None
    assert buffer_sizes == []
