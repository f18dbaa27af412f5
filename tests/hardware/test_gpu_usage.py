"""The use of GPUs by NVML, with a stand-in for its binding."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.bench.speed import llama_bench_output
from llmcli.bench.speed.measure import ModelUnderTest, SpeedResult
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.hardware import gpu_usage
from llmcli.hardware.gpu_usage import GpuUsage, UsageSampler, format_usage, merge_samples, read_gpus
from llmcli.serve.engine_thread.metrics import LiveGauges, ServerMetrics
from llmcli.serve.processes.merged_metrics import merge_metrics
from tests.fixtures.fakes import fake_runner

GB = 1 << 30


class NVMLError(Exception):
    pass


class StandIn(SimpleNamespace):
    """The binding of NVML with two GPUs. The second one does not report its power."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__(n_starts=0, is_gone=False, busy=80)

    def nvmlInit(self) -> None:
        self.n_starts += 1

    def nvmlDeviceGetCount(self) -> int:
        if self.is_gone:
            raise NVMLError("driver/library version mismatch")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return b"A \xff" if handle else "B"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self.busy + handle, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 * GB, total=8 * GB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise NVMLError("not supported")
        return 71_000


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    binding = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", binding)  # type: ignore[arg-type]
    gpu_usage._open_nvml.cache_clear()
    yield binding
    gpu_usage._open_nvml.cache_clear()


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    gpu_usage._open_nvml.cache_clear()
    yield
    gpu_usage._open_nvml.cache_clear()


def test_the_use_of_each_gpu_is_read(nvml: StandIn) -> None:
    first, second = read_gpus()
    assert first == GpuUsage(0, "B", 0.8, 0.4, 3 * GB, 8 * GB, 71.0)
    assert (second.name, second.watts) == ("A \ufffd", None)
    assert format_usage(first) == "GPU 0 (B): 80 % busy, 3.0 GiB of 8.0 GiB used, 71 W"
    assert format_usage(second) == "GPU 1 (A \ufffd): 81 % busy, 3.0 GiB of 8.0 GiB used"
    read_gpus()
    assert nvml.n_starts == 1
    nvml.is_gone = True
    assert read_gpus() == ()


def test_without_nvml_there_are_no_numbers_and_no_thread(no_nvml: None) -> None:
    assert read_gpus() == ()
    with UsageSampler() as usage:
        assert usage._thread is None
    assert usage.gpus == ()


def test_a_driver_that_does_not_start_is_no_error(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise NVMLError("driver not loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert read_gpus() == ()


def test_a_block_is_measured_even_if_it_is_short(nvml: StandIn) -> None:
    with UsageSampler(seconds=60) as usage:
        pass
    assert [gpu.busy for gpu in usage.gpus] == [0.8, 0.81]


def test_samples_become_means_and_the_largest_memory() -> None:
    one = GpuUsage(0, "B", 0.5, None, 1, 8, 10.0)
    other = GpuUsage(0, "B", 1.0, None, 3, 8, None)
    assert merge_samples([(one,), (), (other,)]) == (GpuUsage(0, "B", 0.75, None, 3, 8, 10.0),)
    assert merge_samples([]) == ()


def test_results_of_bench_have_the_use_of_the_gpus() -> None:
    test = SpeedTest(8, 0, 0, 8, 8, "f16", "f16", 1, -1, "auto")
    gpu = GpuUsage(0, "B", 0.5, 0.25, 1, 8, 10.0)
    result = SpeedResult(ModelUnderTest("x", "llama", 1, 1), test, "", (10,), (), gpus=(gpu,))
    assert llama_bench_output.build_row(result)["gpus"][0]["busy"] == 0.5
    assert llama_bench_output.usage_lines([result]) == [format_usage(gpu)]
    assert "gpus" not in llama_bench_output.format_results([result], "csv").splitlines()[0]


def test_metrics_name_each_gpu_and_replicas_on_one_machine_do_not_add_up() -> None:
    runner = fake_runner(b"x", n_ctx=512, n_seq_max=2)
    gpus = (
        GpuUsage(0, "B", 0.5, None, 1, 8, None),
        GpuUsage(1, 'A "x"', 0.25, 0.125, 3, 8, 10.5),
    )
    gauges = LiveGauges(runner.engine.stats, runner.kv_report(), 0, 1000, gpus)
    text = ServerMetrics().render("tiny", gauges)
    merged = merge_metrics({"a": text, "b": text})
    for each in (text, merged):
        lines = each.splitlines()
        assert 'llmcli_gpu_busy_ratio{gpu="0",name="B"} 0.5' in lines
        assert 'llmcli_gpu_busy_ratio{gpu="1",name="A \\"x\\""} 0.25' in lines
        assert 'llmcli_gpu_power_watts{gpu="1",name="A \\"x\\""} 10.5' in lines
        assert not any(line.startswith('llmcli_gpu_power_watts{gpu="0"') for line in lines)
        assert lines.count("# TYPE llmcli_gpu_busy_ratio gauge") == 1
    plain = ServerMetrics().render(
        "tiny", LiveGauges(runner.engine.stats, runner.kv_report(), 0, 1000)
    )
    assert "llmcli_gpu" not in plain
