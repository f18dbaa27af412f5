"""Passes a placement to llama.cpp: the fields of llama_model_params that say where weights go."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding import contract
from llmcli.runtime.binding.contract import TensorBufferOverride, set_fields
from llmcli.runtime.binding.library import lib, registry_lock
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.model_placement import (
    LOAD_MODES,
    NO_DEVICES,
    NUMA_STRATEGIES,
    SPLIT_MODES,
    ModelPlacement,
    TensorOverride,
)

SPLIT_NUMBERS = {
    name: contract.CONSTANTS[f"LLAMA_SPLIT_MODE_{name.upper()}"] for name in SPLIT_MODES
}
LOAD_NUMBERS = {
    name: contract.CONSTANTS[f"LLAMA_LOAD_MODE_{name.upper().replace('+', '_')}"]
    for name in LOAD_MODES
}
NUMA_NUMBERS = {
    name: contract.CONSTANTS[f"GGML_NUMA_STRATEGY_{name.upper()}"] for name in NUMA_STRATEGIES
}
_numa_lock = threading.Lock()
_numa_strategies: list[str] = []  # the strategy of this process, once it is set


def set_placement(params: Any, placement: ModelPlacement) -> list[Any]:
    """Set the fields of llama_model_params. Return the arrays that they point to, which must stay
    alive until the model is loaded. Raises UserError for a device or a buffer that is not there.
    """
    set_fields(
        params,
        n_gpu_layers=placement.gpu_layers,
        split_mode=SPLIT_NUMBERS[placement.split_mode],
        main_gpu=placement.main_gpu,
        load_mode=LOAD_NUMBERS[placement.load_mode],
    )
    arrays: list[Any] = []
    if placement.tensor_split:
        limit = lib().LLAMA_MAX_DEVICES
        assert len(placement.tensor_split) <= limit, (placement, limit)
        set_fields(params, tensor_split=(ctypes.c_float * limit)(*placement.tensor_split))
    if placement.devices:
        arrays.append(_device_array(placement.devices))
        set_fields(params, devices=ctypes.addressof(arrays[-1]))
    if placement.overrides:
        arrays.append(_override_array(placement.overrides))
        set_fields(params, tensor_buft_overrides=ctypes.addressof(arrays[-1]))
    return arrays


def init_numa(strategy: str) -> None:
    """Set how threads are spread over the NUMA nodes, once in a process and before a model is
    loaded. `strategy`: one of NUMA_STRATEGIES, or empty to leave this to the system.
    """
    with _numa_lock:
        if strategy and not _numa_strategies:
            with registry_lock:
                lib().llama_numa_init(NUMA_NUMBERS[strategy])
            _numa_strategies.append(strategy)


def _device_array(names: Sequence[str]) -> Any:
    """Return the devices with these names as an array that ends with a null pointer."""
    names = () if tuple(names) == NO_DEVICES else names
    addresses = [devices.find_device(name) for name in names]
    if None in addresses:
        name = names[addresses.index(None)]
        raise UserError(f"the device {name} is not there", hint=devices_hint())
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses, None)


def _override_array(overrides: Sequence[TensorOverride]) -> Any:
    """Return overrides as an array that ends with an entry without a pattern."""
    entries = []
    for override in overrides:
        buffer_type = devices.find_buffer_type(override.buffer)
        if buffer_type is None:
            raise UserError(f"there is no buffer type {override.buffer}", hint=buffers_hint())
        entries.append(TensorBufferOverride(override.pattern.encode(), buffer_type))
    return (TensorBufferOverride * (len(entries) + 1))(*entries)


def devices_hint() -> str:
    """Return what -dev takes on this machine."""
    return f"-dev takes names of: {', '.join((*_offload_names(), *NO_DEVICES))}"


def buffers_hint() -> str:
    """Return which buffers -ot takes on this machine."""
    return f"-ot takes PATTERN=BUFFER with one of: {', '.join((devices.HOST_DEVICE, *_offload_names()))}"


def _offload_names() -> list[str]:
    return [device.name for device in devices.list_devices() if device.kind in devices.GPU_KINDS]
