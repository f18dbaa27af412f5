"""How busy NVIDIA GPUs are and how much of their memory is used, as NVML reports it.

NVML comes with the driver, and its Python binding with the extra `nvml`. Without either, there are no
numbers. NVML counts GPUs in the order of the PCI bus, in which CUDA need not count them.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

SAMPLE_SECONDS = 0.2  # NVML itself averages over about this time


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The use of a GPU. `busy`: the share of the time in which it computed anything, 0 to 1.
    `memory_busy`: the same for reading and writing its memory. None: the driver does not say.
    """

    index: int
    name: str
    busy: float | None
    memory_busy: float | None
    used_bytes: int | None
    total_bytes: int | None
    watts: float | None


def read_gpus() -> tuple[GpuUsage, ...]:
    """Return the present use of each GPU; empty if NVML or its binding is missing."""
    nvml = _open_nvml()
    if nvml is None:
        return ()
    try:
        count = nvml.nvmlDeviceGetCount()
        return tuple(_read_gpu(nvml, index) for index in range(count))
    except nvml.NVMLError:  # for example, the driver was updated while this process runs
        return ()


class UsageSampler:
    """Measures the use of the GPUs in a `with` block, on a thread of its own. Without NVML there is
    no thread. `gpus`: after the block, the mean shares and watts, and the largest memory.
    """

    def __init__(self, seconds: float = SAMPLE_SECONDS) -> None:
        self.gpus: tuple[GpuUsage, ...] = ()
        self._seconds = seconds
        self._samples: list[tuple[GpuUsage, ...]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "UsageSampler":
        if _open_nvml() is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self.gpus = merge_samples(self._samples)

    def _sample(self) -> None:
        while not self._ended.wait(self._seconds):
            self._samples.append(read_gpus())
        self._samples.append(read_gpus())


def merge_samples(samples: list[tuple[GpuUsage, ...]]) -> tuple[GpuUsage, ...]:
    """Return the mean shares and watts of each GPU and its largest memory. A sample in which a GPU
    is missing does not count for it.
    """
    by_index: dict[int, list[GpuUsage]] = {}
    for sample in samples:
        for gpu in sample:
            by_index.setdefault(gpu.index, []).append(gpu)
    return tuple(
        replace(
            gpus[-1],
            busy=_mean([gpu.busy for gpu in gpus]),
            memory_busy=_mean([gpu.memory_busy for gpu in gpus]),
            watts=_mean([gpu.watts for gpu in gpus]),
            used_bytes=max(
                (gpu.used_bytes for gpu in gpus if gpu.used_bytes is not None), default=None
            ),
        )
        for _, gpus in sorted(by_index.items())
    )


def format_usage(gpu: GpuUsage) -> str:
    """Return one line about a GPU, such as "GPU 0 (NVIDIA A100): 87 % busy, 12.1 GiB of 40.0 GiB
    used, 240 W".
    """
    from llmcli.units import format_size

    parts = [] if gpu.busy is None else [f"{gpu.busy:.0%} busy".replace("%", " %")]
    if gpu.used_bytes is not None and gpu.total_bytes is not None:
        parts.append(f"{format_size(gpu.used_bytes)} of {format_size(gpu.total_bytes)} used")
    parts += [] if gpu.watts is None else [f"{gpu.watts:.0f} W"]
    return f"GPU {gpu.index} ({gpu.name}): {', '.join(parts) or 'the driver reports nothing'}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _read_gpu(nvml: Any, index: int) -> GpuUsage:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def read(function: Callable[[Any], Any]) -> Any:
        with suppress(nvml.NVMLError):  # some GPUs do not report some values
            return function(handle)
        return None

    rates = read(nvml.nvmlDeviceGetUtilizationRates)
    memory = read(nvml.nvmlDeviceGetMemoryInfo)
    milliwatts = read(nvml.nvmlDeviceGetPowerUsage)
    name = read(nvml.nvmlDeviceGetName) or "unknown"
    return GpuUsage(
        index,
        name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name),
        None if rates is None else rates.gpu / 100,
        None if rates is None else rates.memory / 100,
        None if memory is None else int(memory.used),
        None if memory is None else int(memory.total),
        None if milliwatts is None else milliwatts / 1000,
    )


@functools.cache
def _open_nvml() -> Any | None:
    """Return the binding of NVML, initialized once; None if it or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
