"""The memory check on machines with GPUs that are not here, and what is said if memory or a device
is gone between the check and the load.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.hardware.processor import Processor
from llmcli.planning import admission
from llmcli.planning.dry_runs import memory_plan, nearest_fit
from llmcli.planning.dry_runs.memory_plan import DeviceMemory
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.planning.machine import Machine, OffloadDevice
from llmcli.planning.placement.device_shares import share_devices
from llmcli.planning.placement.plan_placement import plan_placement
from llmcli.runtime.binding.model import AllocationError
from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.runtime.binding.placement.model_placement import NO_DEVICES
from llmcli.runtime.draft_settings import NO_DRAFTING
from llmcli.runtime.requests.request import RunOptions
from quant.model_file import read_header
from scripts.fuzz.tiny_architectures import write_model

GB = 1 << 30
PROCESSOR = Processor(4, 0, 8, None, (4,))
OPTIONS = RunOptions(512, 1, 1, batch_size=64, ubatch_size=64)
CUDA0, CUDA1 = "CUDA0", "CUDA1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices") / "moe.gguf"
    write_model(path, "qwen3moe")
    return path


def machine(*free: int, host: int = 64 * GB) -> Machine:
    """Return a machine with GPUs of these free bytes, of which nothing is reserved."""
    devices = (
        OffloadDevice(f"CUDA{index}", "gpu", nbytes, 0, 1e12) for index, nbytes in enumerate(free)
    )
    return Machine(PROCESSOR, host, 1e6, tuple(devices))


class Here:
    """The machine as the check sees it; dry runs report what is predicted for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, present: Machine) -> None:
        self.machine = present
        monkeypatch.setattr(admission, "read_machine", lambda: self.machine)
        monkeypatch.setattr(memory_plan, "free_by_device", self.free_by_device)
        monkeypatch.setattr(nearest_fit, "free_by_device", self.free_by_device)
        monkeypatch.setattr(nearest_fit, "open_nearest_fit", self.open_nearest_fit)
        monkeypatch.setattr(admission, "_surely_fits", lambda plan: False)
        monkeypatch.setattr(nearest_fit, "GROWTH_BYTES", 0)

    def free_by_device(self) -> dict[str, int | None]:
        return {HOST_DEVICE: self.machine.free_bytes} | {
            device.name: device.free_bytes for device in self.machine.devices
        }

    @contextmanager
    def open_nearest_fit(self, plan: RunPlan) -> Iterator[nearest_fit.NearestFit]:
        here = self

        class DryRun(nearest_fit.NearestFit):
            def device_memory(self, plan: RunPlan) -> tuple[DeviceMemory, ...]:
                shares = share_devices(
                    plan.header, plan.options, plan.placement, plan.context, here.machine
                )
                free = here.free_by_device()
                return tuple(
                    DeviceMemory(
                        share.device,
                        share.layer_bytes + share.expert_bytes + share.override_bytes,
                        0,
                        share.kv_bytes,
                        share.compute_bytes,
                        0,
                        0,
                        free.get(share.device),
                        is_mapped=plan.placement.maps_file,
                    )
                    for share in shares
                )

        yield DryRun(None)  # type: ignore[arg-type]


def make_plan(model: Path, present: Machine, **options: object) -> RunPlan:
    """Return the plan of a run on a machine."""
    header = read_header.read_header(model)
    chosen = replace(OPTIONS, **options)  # type: ignore[arg-type]
    placement = plan_placement(header, chosen, present, 512).placement
    return RunPlan("tiny", header, chosen, placement, NO_DRAFTING, is_ctx_requested=True)


def needed(plan: RunPlan, present: Machine, device: str) -> int:
    """Return the bytes that a plan takes on a device."""
    shares = share_devices(plan.header, plan.options, plan.placement, plan.context, present)
    (share,) = (share for share in shares if share.device == device)
    sizes = share.layer_bytes, share.expert_bytes, share.override_bytes, share.kv_bytes
    return sum(sizes) + share.compute_bytes


def test_a_gpu_that_shrinks_before_the_check_gets_fewer_layers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = machine(GB)
    plan = make_plan(model, large)
    assert (plan.placement.gpu_layers, plan.placement.cpu_moe_layers) == (-1, 0)
    Here(monkeypatch, machine(needed(plan, large, CUDA0) - 1))
    notes: list[str] = []
    moved = admission.check_memory(plan, "", notes.append)
    assert moved.placement != plan.placement
    assert moved.context == plan.context
    assert notes[0].startswith("limited by the available memory: ")


def test_typed_layers_are_not_changed_but_the_nearest_are_said(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = machine(GB)
    plan = make_plan(model, large, gpu_layers="all", cpu_moe="0")
    Here(monkeypatch, machine(needed(plan, large, CUDA0) - 1))
    with pytest.raises(UserError, match="tiny with 512 tokens of context does not fit") as caught:
        admission.check_memory(plan, "", print)
    assert caught.value.hint.startswith("-ngl 2 would fit")
    typed = make_plan(model, large, cpu_moe="0")
    moved = admission.check_memory(typed, "", lambda note: None)
    assert moved.placement.cpu_moe_layers == 0  # typed
    assert 0 <= moved.placement.gpu_layers < 3


def test_a_device_that_is_gone_at_the_load_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = machine(GB, GB)
    plan = make_plan(model, both)
    Here(monkeypatch, machine(0, 0, host=32 * GB))
    failure = AllocationError("llama.cpp cannot load x: unable to allocate CUDA0 buffer", hint="?")
    error = admission.explain_failed_load(plan, failure)
    assert str(error).count("\n") == 0
    assert "32.0 GiB on CPU, 0 B on CUDA0, 0 B on CUDA1 are free now" in str(error)
    assert error.hint == "-ngl 0 would fit; llmcli plan tiny shows more"


def test_memory_of_the_host_that_shrinks_before_the_load_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(model, machine(), ctx_size=8192)
    small = make_plan(model, machine(), ctx_size=2048)
    failure = AllocationError("llama.cpp refuses this context: failed to allocate", hint="?")
    Here(monkeypatch, machine(host=needed(small, machine(), HOST_DEVICE)))
    error = admission.explain_failed_load(plan, failure)
    assert "-c 2" in (error.hint or "")
    Here(monkeypatch, machine(host=1))  # fits nowhere: the error of llama.cpp stays
    assert admission.explain_failed_load(plan, failure) is failure


def test_locked_weights_must_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for load_mode, fits in (("auto", True), ("mmap+mlock", False), ("none", False)):
        plan = make_plan(model, machine(), load_mode=load_mode, devices=NO_DEVICES)
        weights = plan.header.tensor_bytes
        here = Here(monkeypatch, machine(host=needed(plan, machine(), HOST_DEVICE) - weights // 2))
        with here.open_nearest_fit(plan) as dry_run:
            free = dry_run.free_after(plan)
        assert free is not None
        assert (load_mode, free >= 0) == (load_mode, fits)


def test_each_device_must_surely_fit_and_not_only_all_together(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = machine(GB, 1 << 20)
    monkeypatch.setattr(admission, "read_machine", lambda: present)
    for names, expected in (((CUDA0,), True), ((CUDA1,), False)):
        plan = make_plan(model, machine(GB, GB), gpu_layers="all", devices=names)
        assert admission._surely_fits(plan) == expected
    gone = make_plan(model, machine(GB, GB, GB), gpu_layers="all", devices=("CUDA2",))
    with pytest.raises(UserError, match="the device CUDA2 is not there"):
        admission.check_memory(gone, "", print)
