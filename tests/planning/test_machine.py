"""Which devices planning uses, and how many threads."""

import pytest

from llmcli.hardware.processor import Processor
from llmcli.planning.machine import offload_devices, read_machine
from llmcli.planning.prediction.model_layout import LayerWeights, ModelLayout
from llmcli.planning.prediction.thread_count import choose_threads, seconds_with_threads
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.devices import Device

GIB = 1 << 30


def device(name: str, kind: str = "gpu", gib: int = 8) -> Device:
    return Device(name, name, kind, gib * GIB, gib * GIB)


def test_workers_come_first_and_integrated_gpus_only_without_others() -> None:
    found = [device("CPU", "cpu"), device("Vulkan0", "igpu"), device("CUDA0"), device("RPC0")]
    assert [each.name for each in offload_devices(found, 1e9)] == ["RPC0", "CUDA0"]
    found = [device("Vulkan0", "igpu"), device("RPC0")]
    assert [(each.name, each.kind) for each in offload_devices(found, 1e9)] == [
        ("RPC0", "rpc"),
        ("Vulkan0", "igpu"),
    ]
    assert offload_devices([device("CPU", "cpu"), device("BLAS", "accel")], 1e9) == ()


def test_memory_of_metal_is_that_of_the_host_on_apples_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_is_apple_arm", lambda: True)
    (metal,) = offload_devices([device("MTL0")], 1e9)
    assert metal.shares_host_memory
    monkeypatch.setattr(devices, "_is_apple_arm", lambda: False)
    (metal,) = offload_devices([device("MTL0")], 1e9)
    assert not metal.shares_host_memory


def test_a_part_of_a_device_stays_free() -> None:
    large, small = offload_devices([device("A", gib=24), device("B", gib=4)], 1e9)
    assert large.usable_bytes == 23 * GIB
    assert small.usable_bytes == 3.5 * GIB


def test_this_machine_is_read() -> None:
    found = read_machine()
    assert found.processor.usable_cores >= 1
    assert found.free_bytes is None or found.free_bytes > 0
    assert found.host_rate > 0


def layout(nbytes: int, n_layers: int) -> ModelLayout:
    """Return a model of `nbytes` bytes that a token reads completely."""
    layer = LayerWeights(nbytes // n_layers)
    return ModelLayout((layer,) * n_layers, 0, 0, 0, 1.0, 1, 1, 1, 1, 1)


def test_a_small_model_gets_fewer_threads_than_there_are_cores() -> None:
    server = Processor(64, 0, 128, None, (64,))
    small, large = layout(100 << 20, 30), layout(40 << 30, 80)
    assert 8 <= choose_threads(server, small) < 40
    assert choose_threads(server, large) == 64
    assert choose_threads(Processor(2, 0, 4, None, (2,)), small) == 2


def test_a_model_that_one_memory_node_reads_fast_enough_stays_there() -> None:
    nodes = Processor(128, 0, 256, None, (16,) * 8)
    assert choose_threads(nodes, layout(100 << 20, 30)) <= 16
    assert choose_threads(nodes, layout(40 << 30, 80)) > 64


@pytest.mark.parametrize("quota", [0.5, 1.0, 2.5, 6.0])
def test_threads_keep_to_the_quota(quota: float) -> None:
    processor = Processor(16, 8, 40, quota, (16,))
    assert choose_threads(processor, layout(4 << 30, 32)) == max(1, int(quota))


def test_the_time_of_a_token_has_a_minimum_over_threads() -> None:
    processor = Processor(64, 0, 64, None, (64,))
    times = [seconds_with_threads(processor, layout(100 << 20, 30), n) for n in range(1, 65)]
    best = times.index(min(times))
    assert times[0] > times[best] < times[-1]
