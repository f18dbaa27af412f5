"""The devices llama.cpp found in this build on this machine (ggml-backend.h)."""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from llmcli.runtime.binding.library import ggml

KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}  # enum ggml_backend_dev_type


@dataclass(frozen=True, slots=True)
class Device:
    """One device; memory in bytes as its driver tells it."""

    name: str
    description: str
    kind: str
    free: int
    total: int


def devices() -> list[Device]:
    """Every device, the CPU among them."""
    library = _functions()
    found = []
    for index in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            Device(
                library.ggml_backend_dev_name(device).decode(),
                library.ggml_backend_dev_description(device).decode(),
                KINDS.get(library.ggml_backend_dev_type(device), "other"),
                free.value,
                total.value,
            )
        )
    return found


def gpu_free() -> int | None:
    """Free bytes over all GPUs, None where there is none."""
    gpus = [device.free for device in devices() if device.kind in ("gpu", "igpu")]
    return sum(gpus) if gpus else None


@functools.cache
def _functions() -> Any:
    library = ggml()
    for name, result, arguments in (
        ("count", ctypes.c_size_t, []),
        ("get", ctypes.c_void_p, [ctypes.c_size_t]),
        ("name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("description", ctypes.c_char_p, [ctypes.c_void_p]),
        ("type", ctypes.c_int, [ctypes.c_void_p]),
        ("memory", None, [ctypes.c_void_p] * 3),
    ):
        function = getattr(library, f"ggml_backend_dev_{name}")
        function.restype, function.argtypes = result, arguments
    return library
