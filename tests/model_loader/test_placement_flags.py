"""The options of the placement as they are typed: values, contradictions, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from llmcli.errors import UsageError, UserError
from llmcli.hardware.processor import Processor
from llmcli.model_loader.placement_flags import PlacementFlags
from llmcli.planning.machine import Machine, OffloadDevice
from llmcli.planning.placement import used_devices
from llmcli.planning.placement.used_devices import use_devices
from llmcli.runtime.binding.placement.model_placement import NO_DEVICES, TensorOverride
from llmcli.runtime.requests.placement_options import NO_PLACEMENT, PlacementOptions
from tests.fixtures.cli import Done

GB = 1 << 30


def device(name: str, kind: str = "gpu") -> OffloadDevice:
    return OffloadDevice(name, kind, 8 * GB, 8 * GB, 1e12)


MACHINE = Machine(
    Processor(4, 0, 8, None, (4,)),
    GB,
    1e9,
    (device("RPC0", "rpc"), device("CUDA0"), device("CUDA1")),
    (device("Vulkan0", "igpu"),),
)


def test_values_become_options() -> None:
    flags = PlacementFlags(
        device="CUDA1, RPC0",
        tensor_split="3/1",
        split_mode="LAYER",
        n_cpu_moe="7",
        override_tensor=[r"a\.=CPU,b=CUDA1", "c=RPC0"],
        no_kv_offload=True,
        load_mode="mmap+mlock",
        numa="isolate",
    )
    assert flags.parse() == PlacementOptions(
        tensor_split=(3.0, 1.0),
        cpu_moe="7",
        kv_offload=False,
        devices=("CUDA1", "RPC0"),
        tensor_overrides=(
            TensorOverride(r"a\.", "CPU"),
            TensorOverride("b", "CUDA1"),
            TensorOverride("c", "RPC0"),
        ),
        load_mode="mmap+mlock",
        numa="isolate",
    )
    assert PlacementFlags().parse() == NO_PLACEMENT
    assert PlacementFlags(cpu_moe=True).parse().cpu_moe == "all"
    assert PlacementFlags(device="none").parse().devices == NO_DEVICES
    assert PlacementFlags(split_mode="none", main_gpu=2).parse().main_gpu == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"mlock": True}, "mmap+mlock"),
        ({"mlock": True, "no_mmap": True}, "mlock"),
        ({"no_mmap": True}, "none"),
        ({"mmap": True}, "mmap"),
        ({}, "auto"),
    ],
)
def test_older_options_of_loading(words: dict[str, Any], expected: str) -> None:
    assert PlacementFlags(**words).parse().load_mode == expected


@pytest.mark.parametrize(
    ("words", "kind", "message", "hint"),
    [
        ({"device": "a,,b"}, UserError, "--device is", "-dev takes names"),
        ({"device": "none,a"}, UserError, "--device is", "-dev takes names"),
        ({"device": "a,a"}, UserError, "twice", "once"),
        ({"device": "none", "tensor_split": "1"}, UsageError, "uses no device", "-dev none"),
        ({"device": "none", "rpc": "a"}, UsageError, "uses no device", "--rpc"),
        ({"split_mode": "rows"}, UserError, "-sm is 'rows'", "none, layer, row, tensor"),
        ({"main_gpu": 1}, UsageError, "-sm layer does not have", "-sm none -mg 1"),
        ({"tensor_split": "1,x"}, UserError, "--tensor-split is", "such as 3,1"),
        ({"n_cpu_moe": "-1"}, UserError, "--n-cpu-moe is '-1'", "auto or all"),
        ({"n_cpu_moe": "3", "cpu_moe": True}, UsageError, "those of 3", "leave out one"),
        ({"override_tensor": ["blk"]}, UserError, "is not PATTERN=BUFFER", "-ot"),
        ({"override_tensor": ["=CPU"]}, UserError, "is not PATTERN=BUFFER", "-ot"),
        ({"override_tensor": ["a="]}, UserError, "is not PATTERN=BUFFER", "-ot"),
        ({"override_tensor": ["(=CPU"]}, UserError, "has a ( without", "blk"),
        ({"load_mode": "dio"}, UserError, "--load-mode is 'dio'", "mmap"),
        ({"load_mode": "mmap", "mlock": True}, UsageError, "both say", "leave out --mlock"),
        ({"mmap": True, "no_mmap": True}, UsageError, "contradict", "leave out one"),
        ({"numa": "mirror"}, UserError, "--numa is 'mirror'", "distribute"),
    ],
)
def test_wrong_values_are_one_line_with_what_to_type(
    words: dict[str, Any], kind: type[UserError], message: str, hint: str
) -> None:
    with pytest.raises(kind) as caught:
        PlacementFlags(**words).parse()
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value) + caught.value.hint


def test_the_devices_of_a_run_are_chosen_and_ordered() -> None:
    def names(**options: Any) -> list[str]:
        return [each.name for each in use_devices(MACHINE, PlacementOptions(**options)).devices]

    assert names() == ["RPC0", "CUDA0", "CUDA1"]
    assert names(devices=("CUDA1", "Vulkan0")) == ["CUDA1", "Vulkan0"]
    assert names(devices=NO_DEVICES) == []
    assert names(split_mode="none") == ["RPC0"]
    assert names(split_mode="none", main_gpu=1, devices=("CUDA1", "CUDA0")) == ["CUDA0"]
    assert names(split_mode="none", main_gpu=-1) == []
    with pytest.raises(UserError, match="the device CUDA7 is not there"):
        names(devices=("CUDA7",))
    with pytest.raises(UserError, match="--main-gpu is 3, but there are 3 devices") as caught:
        names(split_mode="none", main_gpu=3)
    assert caught.value.hint == "-mg takes one of: 0 (RPC0), 1 (CUDA0), 2 (CUDA1)"


def test_options_are_checked_against_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_devices, "read_machine", lambda: MACHINE)
    resolve = used_devices.resolve_devices
    with pytest.raises(UserError, match="has 4 numbers for 3 devices") as caught:
        resolve(PlacementOptions(tensor_split=(1, 1, 1, 1)))
    assert caught.value.hint.endswith("in this order: RPC0, CUDA0, CUDA1")
    with pytest.raises(UserError, match="RPC0 cannot share a matrix"):
        resolve(PlacementOptions(split_mode="row"))
    for buffer in ("CUDA0", "nothing"):  # no such buffer in this process
        with pytest.raises(UserError, match=f"the buffer {buffer} is not there"):
            resolve(PlacementOptions(tensor_overrides=(TensorOverride("a", buffer),)))
    monkeypatch.setattr(used_devices, "read_machine", MACHINE.without_devices)
    with pytest.raises(UserError, match="there is no device to split over"):
        resolve(PlacementOptions(split_mode="tensor"))
    with pytest.raises(UserError, match="has 1 numbers for 0 devices"):
        resolve(PlacementOptions(tensor_split=(1,)))


@pytest.mark.parametrize(
    "command",
    [
        *("run", "chat", "serve", "batch", "plan", "eval", "calibrate", "quantize", "pareto"),
        *("embed", "rerank"),
        *("bench phases", "bench tune", "bench compare", "bench spec"),
    ],
)
def test_every_command_that_runs_a_model_has_the_options(command: str) -> None:
    program = (
        "import json, sys, typer\n"
        "from llmcli.commands.cli import app\n"
        "main = typer.main.get_command(app)\n"
        "for word in sys.argv[1].split():\n"
        "    main = main.get_command(None, word)\n"
        "context = main.make_context('x', [], resilient_parsing=True)\n"
        "print(json.dumps([o for p in main.get_params(context) for o in p.opts]))\n"
    )
    done = subprocess.run((sys.executable, "-c", program, command), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = json.loads(done.stdout)
    assert len(set(options)) == len(options)
    wanted = "-dev -sm -mg -ts -ncmoe -cmoe -ot -nkvo -lm --mlock --mmap --no-mmap --numa"
    assert set(wanted.split()) <= set(options)


def test_contradictions_are_errors_before_a_model_is_opened(llmcli: Callable[..., Done]) -> None:
    for words, message in (
        (("run", "x.gguf", "hi", "--reproducible", "-ot", "a=CPU"), "have no effect"),
        (("run", "x.gguf", "hi", "-cmoe", "-ncmoe", "1"), "--n-cpu-moe those of 1"),
        (("plan", "x.gguf", "-mg", "1"), "-sm none -mg 1"),
        (("quantize", "x.gguf", "--q8_0", "--mlock"), "--mlock has no effect"),
        (("calibrate", "x.gguf", "y", "-o", "z", "--merge", "-nkvo"), "--no-kv-offload"),
    ):
        done = llmcli(*words)
        assert (done.code, message in done.err) == (2, True), (words, done.err)


def test_the_first_gpu_is_typed_too() -> None:
    assert PlacementFlags(main_gpu=0).typed == ("main_gpu",)
    with pytest.raises(UsageError, match="--main-gpu names the only device"):
        PlacementFlags(main_gpu=0).parse()
