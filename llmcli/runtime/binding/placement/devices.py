"""The compute devices that llama.cpp found on this machine (ggml-backend.h), and the types of their
buffers.
"""

import ctypes
import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.runtime.binding.contract import EXTRA_BUFFER_TYPES, HEADER_NUMBERS
from llmcli.runtime.binding.library import ggml, registry_lock

HOST_DEVICE, GPU_KINDS = "CPU", ("gpu", "igpu")
MAPPED_BUFFER = "CPU_Mapped"  # the type of buffers in a mapped file
DEVICE_KINDS = {
    HEADER_NUMBERS[f"GGML_BACKEND_DEVICE_TYPE_{kind.upper()}"]: kind
    for kind in ("cpu", "gpu", "igpu", "accel", "meta")
}


_free_limits: dict[str, int] = {}  # see limit_device_memory


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device. `kind`: "cpu", "gpu", "igpu" (integrated GPU), "accel", "meta" (several
    devices that share each layer) or "other".
    `free_bytes` and `total_bytes`: its memory, as its driver reports it.
    """

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int

    @property
    def is_worker(self) -> bool:
        """Return whether the device is that of an RPC worker."""
        return self.name.startswith("RPC")

    @property
    def is_unified(self) -> bool:
        """Return whether the device uses the memory of the host: an integrated GPU, or Metal on
        Apple's processors.
        """
        return self.kind == "igpu" or (self.name.startswith(("Metal", "MTL")) and _is_apple_arm())


def _is_apple_arm() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


@dataclass(frozen=True, slots=True)
class BufferType:
    """A type of llama.cpp's memory buffers. `name`: such as "CPU_Mapped" or "CUDA0". `device`: the
    name of the device whose memory the buffers use; all host memory counts as "CPU".
    """

    name: str
    device: str

    @property
    def is_repacked(self) -> bool:
        """Return whether buffers of this type contain copies of weights in the layout of this CPU's
        kernels.
        """
        return (
            self.device == HOST_DEVICE
            and self.name not in (HOST_DEVICE, MAPPED_BUFFER)
            and not self.name.endswith("_Host")
        )


def read_buffer_type(address: int) -> BufferType:
    """Return the name and device of the ggml_backend_buffer_type_t at address `address`."""
    library = _functions()
    name = library.ggml_backend_buft_name(address).decode()
    device = library.ggml_backend_buft_get_device(address)
    kind = DEVICE_KINDS.get(library.ggml_backend_dev_type(device)) if device else None
    is_gpu = kind in (*GPU_KINDS, "meta")
    if not is_gpu or library.ggml_backend_buft_is_host(address):
        return BufferType(name, HOST_DEVICE)
    return BufferType(name, library.ggml_backend_dev_name(device).decode())


def read_type_of_buffer(buffer: int) -> BufferType:
    """Return the name and device of the buffer type of the ggml_backend_buffer_t at address
    `buffer`.
    """
    return read_buffer_type(_functions().ggml_backend_buffer_get_type(buffer))


def list_devices() -> list[Device]:
    """Return all devices that llama.cpp knows: CPU, GPUs, accelerators and the devices of joined
    RPC workers.
    """
    library = _functions()
    result = []
    for device in _addresses():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = library.ggml_backend_dev_name(device).decode()
        result.append(
            Device(
                name,
                library.ggml_backend_dev_description(device).decode(),
                DEVICE_KINDS.get(library.ggml_backend_dev_type(device), "other"),
                _free_limits.get(name, free.value),
                total.value,
            )
        )
    return result


def limit_device_memory(free_bytes: Mapping[str, int]) -> None:
    """Make list_devices() report these free bytes by device in this process, so that everything is
    planned as if other programs took the rest. Nothing enforces them.
    """
    _free_limits.clear()
    _free_limits.update(free_bytes)


def find_device(name: str) -> int | None:
    """Return the address of the ggml_backend_dev_t with this name, or None if there is none."""
    with registry_lock:
        address: int | None = _functions().ggml_backend_dev_by_name(name.encode())
    return address


def find_buffer_type(name: str) -> int | None:
    """Return the address of the ggml_backend_buffer_type_t with this name, or of the device with
    this name; None if there is none. "CPU" is the memory of the host.
    """
    library = _functions()
    if name == HOST_DEVICE:
        host: int | None = library.ggml_backend_cpu_buffer_type()
        return host
    for device in _addresses():
        buffer_type: int | None = library.ggml_backend_dev_buffer_type(device)
        names = library.ggml_backend_dev_name(device), library.ggml_backend_buft_name(buffer_type)
        if buffer_type and name.encode() in names:
            return buffer_type
    return None


def splits_rows(name: str) -> bool:
    """Return whether the back end of the device `name` can split each matrix by rows over several
    devices (-sm row).
    """
    library = _functions()
    device = find_device(name)
    if not device:
        return False
    registry = library.ggml_backend_dev_backend_reg(device)
    return bool(
        library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_split_buffer_type")
    )


def rpc_devices() -> dict[str, tuple[str, ...]]:
    """Return the devices of the RPC workers that llama.cpp uses, as a dictionary from the address
    of a worker, "host:port", to the names of its devices. This asks no worker for anything.
    """
    library = _functions()
    names: dict[str, tuple[str, ...]] = {}
    for device in _addresses():
        if library.ggml_backend_reg_name(library.ggml_backend_dev_backend_reg(device)) == b"RPC":
            endpoint = library.ggml_backend_dev_description(device).decode()
            name = library.ggml_backend_dev_name(device).decode()
            names[endpoint] = (*names.get(endpoint, ()), name)
    return names


def has_gpu() -> bool:
    """Return whether there is a GPU, also that of an RPC worker. This asks no device for its
    memory, which would be a request to each worker.
    """
    library = _functions()
    return any(
        DEVICE_KINDS.get(library.ggml_backend_dev_type(device)) in GPU_KINDS
        for device in _addresses()
    )


def free_gpu_bytes() -> int | None:
    """Return the free bytes of all GPUs together, including those of RPC workers. Return None if
    there is no GPU.
    """
    gpus = [device.free_bytes for device in list_devices() if device.kind in GPU_KINDS]
    return sum(gpus) if gpus else None


def repacks_for_amx() -> bool:
    """Return whether llama.cpp repacks quantized weights for AMX on this machine. Both its build
    and the operating system must support AMX.
    """
    library = _functions()
    with registry_lock:
        device = library.ggml_backend_dev_by_type(0)
    registry = library.ggml_backend_dev_backend_reg(device)
    procedure = library.ggml_backend_reg_get_proc_address(
        registry, EXTRA_BUFFER_TYPES.name.encode()
    )
    if not procedure:
        return False
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(procedure)(device)
    names: list[bytes] = []
    while types and types[len(names)]:
        names.append(library.ggml_backend_buft_name(types[len(names)]))
    return b"AMX" in names


def _addresses() -> list[int]:
    """Return the addresses of all devices. A device stays where it is when others are added."""
    library = _functions()
    with registry_lock:
        return [
            library.ggml_backend_dev_get(index) for index in range(library.ggml_backend_dev_count())
        ]


@functools.cache
def _functions() -> Any:
    """Return libggml with the types of its device and buffer functions declared for ctypes."""
    library = ggml()
    for name, result, arguments in (
        ("dev_count", ctypes.c_size_t, []),
        ("dev_get", ctypes.c_void_p, [ctypes.c_size_t]),
        ("dev_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("dev_description", ctypes.c_char_p, [ctypes.c_void_p]),
        ("dev_type", ctypes.c_int, [ctypes.c_void_p]),
        ("dev_memory", None, [ctypes.c_void_p] * 3),
        ("dev_by_name", ctypes.c_void_p, [ctypes.c_char_p]),
        ("dev_buffer_type", ctypes.c_void_p, [ctypes.c_void_p]),
        ("cpu_buffer_type", ctypes.c_void_p, []),
        ("buft_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("buft_get_device", ctypes.c_void_p, [ctypes.c_void_p]),
        ("buft_is_host", ctypes.c_bool, [ctypes.c_void_p]),
        ("buffer_get_type", ctypes.c_void_p, [ctypes.c_void_p]),
        ("dev_by_type", ctypes.c_void_p, [ctypes.c_int]),
        ("dev_backend_reg", ctypes.c_void_p, [ctypes.c_void_p]),
        ("reg_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("reg_get_proc_address", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    ):
        function = getattr(library, f"ggml_backend_{name}")
        function.restype, function.argtypes = result, arguments
    return library
