"""The memory of GPUs in the admission of models, with processes that load nothing."""

from pathlib import Path

import pytest

from llmcli.api.errors import ApiError
from llmcli.model_loader.planned_memory import sum_by_device
from llmcli.planning.dry_runs.memory_plan import DeviceMemory
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.devices import HOST_DEVICE, Device
from llmcli.serve.processes.models import model_reports
from tests.serve.processes.models.fake_processes import MIB, World, run

NEEDS = {"a": 100 * MIB, "b": 100 * MIB, "c": 100 * MIB}
GPUS = {"CUDA0": 800 * MIB, "CUDA1": 800 * MIB}
GPU_NEEDS = {"a": {"CUDA0": 500 * MIB}, "b": {"CUDA0": 600 * MIB}, "c": {"CUDA1": 700 * MIB}}


def test_models_share_the_memory_of_each_gpu(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.gpus, world.gpu_needs = GPUS, GPU_NEEDS
        await world.ask("a")
        await world.ask("c")
        assert {process.name for process in world.loaded} == {"a", "c"}
        totals = model_reports.memory_totals(world.pool)
        assert totals["reserved_bytes"] == 200 * MIB
        assert totals["devices"]["CUDA1"] == {
            "limit_bytes": 800 * MIB,
            "reserved_bytes": 700 * MIB,
        }
        await world.ask("b")  # the host has room for all, but CUDA0 has not
        assert {process.name for process in world.loaded} == {"b", "c"}
        metrics = await model_reports.collect_metrics(world.pool, {})
        sample = 'llmcli_model_device_bytes{model="b",device="CUDA0"}'
        assert f"{sample} {600 * MIB}\n" in metrics

    run(scenario, tmp_path, NEEDS)


def test_a_model_is_planned_for_what_is_free_without_the_others(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.gpus, world.gpu_needs = GPUS, GPU_NEEDS
        world.changes["a"] = {"is_pinned": True}
        await world.pool.refresh()
        await world.ask("a")
        world.gpus = {"CUDA0": 300 * MIB, "CUDA1": 800 * MIB}  # the limit of CUDA0 stays
        await world.ask("c")
        with pytest.raises(ApiError, match=r"b needs 600\.0 MiB on CUDA0") as refusal:
            await world.ask("b")
        assert "may take 800.0 MiB, of which pinned models take 500.0 MiB" in str(refusal.value)
        assert "gpu_layers" in refusal.value.more["hint"]
        (_, first), (_, second), (_, third) = world.plans[:3]
        assert first == {HOST_DEVICE: 1000 * MIB}
        assert second == {HOST_DEVICE: 900 * MIB, "CUDA0": 300 * MIB}
        # c is not pinned, so that its bytes are free for the plan
        assert third == {**second, "CUDA1": 800 * MIB}

    run(scenario, tmp_path, NEEDS)


def test_the_limit_of_a_gpu_without_models_follows_its_free_memory(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.gpus = {"CUDA0": 100 * MIB}  # another program ends
        await world.ask("a")
        world.gpus, world.gpu_needs = {"CUDA0": 800 * MIB}, {"b": {"CUDA0": 600 * MIB}}
        await world.ask("b")
        assert world.plans[-1] == ("b", {HOST_DEVICE: 1000 * MIB})
        assert {process.name for process in world.loaded} == {"a", "b"}

    run(scenario, tmp_path, NEEDS)


def share(device: str, weights: int, kv: int) -> DeviceMemory:
    return DeviceMemory(device, weights, 0, kv, 1, 1, 0, None)


def test_integrated_gpus_take_memory_of_the_host() -> None:
    found = [
        Device("CPU", "", "cpu", 100, 100),
        Device("CUDA0", "", "gpu", 1000, 1600),
        Device("Vulkan1", "", "igpu", 100, 100),
    ]
    shares = [share("CPU", 10, 1), share("CUDA0", 300, 20), share("Vulkan1", 40, 5)]
    host, on_gpus = sum_by_device(shares, found)
    assert (host.weights, host.kv, host.compute, host.output) == (50, 6, 2, 2)
    # with half of an eighth of the GPU for its driver
    assert on_gpus == {"CUDA0": 322 + 100}
    _, nearly_full = sum_by_device([share("CUDA0", 950, 20)], found)
    assert nearly_full == {"CUDA0": 1000}  # no more than there is, so that it can be loaded alone
    assert sum_by_device(shares[::2], found)[1] == {}


def test_a_process_sees_its_limits_as_the_free_bytes_of_its_gpus() -> None:
    (cpu, *_) = devices.list_devices()
    try:
        devices.limit_device_memory({cpu.name: 12345})
        assert devices.list_devices()[0].free_bytes == 12345
    finally:
        devices.limit_device_memory({})
    assert devices.list_devices()[0].free_bytes != 12345
