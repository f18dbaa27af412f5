"""The machine as planning sees it: a value, so that every decision is a pure function of (machine,
model, request). tests/laboratory plans for machines that are not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.hardware import host
from llmcli.hardware.processor import Processor, read_processor
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.devices import Device

# Assumed rates of reading memory, in bytes per second, where nothing was measured. Only their order
# matters: a GPU is faster than the host, and a worker over the network is slower than a GPU here.
CORE_RATE = 10e9
MAX_HOST_RATE = 60e9
DEVICE_RATES = {"gpu": 400e9, "rpc": 100e9}
# An integrated GPU reads the host's memory, and somewhat faster than the cores do.
INTEGRATED_FACTOR = 1.5
# What a device keeps free for the driver's own buffers and other programs: llama.cpp's own fit
# leaves 1 GiB on each device (common/fit.h); small devices leave an eighth.
DEVICE_RESERVE_BYTES, DEVICE_RESERVE_SHARE = 1 << 30, 8


@dataclass(frozen=True, slots=True)
class OffloadDevice:
    """A device that can hold layers. `kind`: "gpu", "igpu" (memory of the host) or "rpc" (a worker).
    `rate`: bytes per second at which it reads its memory.
    """

    name: str
    kind: str
    free_bytes: int
    total_bytes: int
    rate: float

    @property
    def shares_host_memory(self) -> bool:
        """Return whether the device's memory is that of the host, so that both count together."""
        return self.kind == "igpu"

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that a model may take on the device."""
        reserve = min(DEVICE_RESERVE_BYTES, self.total_bytes // DEVICE_RESERVE_SHARE)
        return max(0, self.free_bytes - reserve)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine. `free_bytes`: free memory of the host; None: unknown. `host_rate`: bytes per second
    at which the processor reads memory. `devices`: those that llama.cpp offloads to, in its order.
    `spare_devices`: those that it only uses if they are named (--device).
    """

    processor: Processor
    free_bytes: int | None
    host_rate: float
    devices: tuple[OffloadDevice, ...] = ()
    spare_devices: tuple[OffloadDevice, ...] = ()

    @property
    def all_devices(self) -> tuple[OffloadDevice, ...]:
        """Return all devices that can hold layers."""
        return (*self.devices, *self.spare_devices)

    def without_devices(self) -> "Machine":
        """Return the machine as a run sees it that offloads nothing."""
        return Machine(self.processor, self.free_bytes, self.host_rate)


def read_machine() -> Machine:
    """Return this machine, with its present free memory."""
    processor = read_processor()
    rate = host_rate(processor)
    found = devices.list_devices()
    chosen = offload_devices(found, rate)
    names = {device.name for device in chosen}
    spare = (
        _offload_device(device, rate)
        for device in found
        if device.kind in devices.GPU_KINDS and device.name not in names
    )
    return Machine(processor, host.available_memory(), rate, chosen, tuple(spare))


def host_rate(processor: Processor) -> float:
    """Return the assumed rate in bytes per second at which a processor reads memory."""
    return min(processor.usable_cores * CORE_RATE, MAX_HOST_RATE)


def offload_devices(found: Sequence[Device], host_rate: float) -> tuple[OffloadDevice, ...]:
    """Return the devices among `found` that llama.cpp puts layers on by default, in its order:
    workers first, then GPUs, and integrated GPUs only without others (src/llama.cpp,
    llama_prepare_model_devices).
    """
    workers = [device for device in found if device.kind == "gpu" and device.is_worker]
    gpus = [device for device in found if device.kind == "gpu" and not device.is_worker]
    integrated = [device for device in found if device.kind == "igpu"]
    return tuple(_offload_device(device, host_rate) for device in (*workers, *(gpus or integrated)))


def _offload_device(device: Device, host_rate: float) -> OffloadDevice:
    """Return a device as planning sees it. `host_rate`: of the machine."""
    kind = "rpc" if device.is_worker else "igpu" if device.is_unified else "gpu"
    return OffloadDevice(
        device.name,
        kind,
        device.free_bytes,
        device.total_bytes,
        DEVICE_RATES.get(kind, INTEGRATED_FACTOR * host_rate),
    )
