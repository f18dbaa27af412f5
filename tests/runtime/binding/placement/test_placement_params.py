"""The parameters that llama.cpp gets for a placement, and what is refused before it is called."""

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.contract import TensorBufferOverride
from llmcli.runtime.binding.library import _collect_error as collect_error
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement import placement_params
from llmcli.runtime.binding.placement.devices import find_buffer_type, find_device
from llmcli.runtime.binding.placement.model_placement import (
    NO_DEVICES,
    ModelPlacement,
    TensorOverride,
)


def read_overrides(params: Any) -> Iterator[tuple[bytes, int]]:
    """Yield the overrides up to the entry without a pattern."""
    entries = ctypes.cast(params.tensor_buft_overrides, ctypes.POINTER(TensorBufferOverride))
    for index in range(100):
        if entries[index].pattern is None:
            return
        yield entries[index].pattern, entries[index].buft


def test_experts_and_overrides_are_one_list_that_ends() -> None:
    params = lib().llama_model_default_params()
    override = TensorOverride(r"blk\.7\.", "CPU")
    placement = ModelPlacement(cpu_moe_layers=3, tensor_overrides=(override,), main_gpu=2)
    arrays = placement_params.set_placement(params, placement)
    assert arrays
    cpu = find_buffer_type("CPU")
    assert list(read_overrides(params)) == [
        (rb"blk\.7\.", cpu),
        (rb"blk\.(0|1|2)\.ffn_(up|down|gate|gate_up)_(ch|)exps", cpu),
    ]
    assert params.main_gpu == 2
    assert ModelPlacement(cpu_moe_layers=-1).overrides == (
        TensorOverride(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),
    )
    assert not ModelPlacement().overrides


def test_devices_are_a_list_that_ends() -> None:
    params = lib().llama_model_default_params()
    arrays = placement_params.set_placement(params, ModelPlacement(devices=NO_DEVICES))
    assert list(arrays[0]) == [None]
    arrays = placement_params.set_placement(params, ModelPlacement(devices=("CPU",)))
    assert list(arrays[0]) == [find_device("CPU"), None]
    assert params.devices == ctypes.addressof(arrays[0])
    placement_params.set_placement(params := lib().llama_model_default_params(), ModelPlacement())
    assert (params.devices, params.tensor_buft_overrides) == (None, None)


def test_names_and_numbers_of_modes() -> None:
    for load_mode, number in (("auto", -1), ("none", 0), ("mlock", 2), ("mmap+mlock", 3)):
        params = lib().llama_model_default_params()
        placement = ModelPlacement(load_mode=load_mode, split_mode="row")
        placement_params.set_placement(params, placement)
        assert (params.load_mode, params.split_mode) == (number, 2)


def test_what_is_not_there_is_one_line(stories_gguf: Path) -> None:
    with pytest.raises(UserError, match="the device GPU9 is not there") as caught:
        with open_model(stories_gguf, ModelPlacement(devices=("GPU9",))):
            pass
    assert caught.value.hint.startswith("-dev takes names of: ")
    override = TensorOverride("blk", "GPU9")
    with pytest.raises(UserError, match="there is no buffer type GPU9"):
        with open_model(stories_gguf, ModelPlacement(tensor_overrides=(override,))):
            pass


def test_the_strategy_for_numa_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(placement_params, "_numa_strategies", [])
    monkeypatch.setattr(lib(), "llama_numa_init", calls.append)
    for strategy in ("", "isolate", "distribute", "isolate"):
        placement_params.init_numa(strategy)
    assert calls == [2]


def test_the_cache_stays_on_the_host_if_asked(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    library, init = lib(), lib().llama_init_from_model

    def record(model: Any, params: Any) -> Any:
        seen.append(params.offload_kqv)
        return init(model, params)

    monkeypatch.setattr(library, "llama_init_from_model", record)
    with open_model(stories_gguf) as model:
        for offload in (True, False):
            with open_context(model, ContextOptions(64, 32, 32, offload_kqv=offload)):
                pass
    assert seen == [True, False]


def test_weights_that_cannot_be_locked_are_an_error(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, load = lib(), lib().llama_model_load_from_file

    def fail_to_lock(path: bytes, params: Any) -> Any:
        pointer = load(path, params)
        text = b"warning: failed to mlock 4096-byte buffer: Cannot allocate memory\n"
        collect_error(3, text, None)
        return pointer

    monkeypatch.setattr(library, "llama_model_load_from_file", fail_to_lock)
    with pytest.raises(UserError, match="to be locked in memory") as caught:
        with open_model(stories_gguf, ModelPlacement(load_mode="mmap+mlock")):
            pass
    assert "ulimit -l unlimited" in caught.value.hint
    with open_model(stories_gguf, ModelPlacement(load_mode="mmap")):
        pass


def can_lock(n_bytes: int) -> bool:
    """Return whether this process may lock memory, besides pages at the ends of a few buffers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return limit == resource.RLIM_INFINITY or limit >= 2 * n_bytes


@pytest.mark.parametrize("load_mode", ["none", "mmap", "mlock"])
def test_all_ways_of_loading_give_the_same_model(stories_gguf: Path, load_mode: str) -> None:
    if load_mode == "mlock" and not can_lock(stories_gguf.stat().st_size):
        pytest.skip("this user may not lock so much memory")
    with (
        open_model(stories_gguf) as model,
        open_model(stories_gguf, ModelPlacement(load_mode=load_mode)) as other,
    ):
        assert (model.n_params, model.nbytes) == (other.n_params, other.nbytes)
