"""Ask the operating system about this machine: processor and memory. None means unknown."""

import platform
from pathlib import Path

from llmcli.hardware.memory_limits import group_free_bytes, own_free_bytes
from llmcli.hardware.processor import read_processor

MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS; with more threads the process crashes


def core_count() -> int:
    """Return how many threads of llama.cpp can compute at once at full speed (Processor)."""
    return read_processor().usable_cores


def cpu_count() -> int:
    """Return how many CPUs (hardware threads) this process may use, within its CPU affinity and the
    CPU quota of its container.
    """
    return read_processor().usable_cpus


def cpu_name() -> str:
    """Return the processor's name, as llama-bench prints it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_identity() -> str:
    """Return a text that identifies this machine by its processor, cores, last-level cache and
    memory. A saved measurement is valid only on machines with the same text.
    """
    cache, memory = last_cache_bytes(), total_memory()
    fields = [
        cpu_name() + _stepping(),
        f"{core_count()} cores",
        "last cache unknown" if cache is None else f"last cache {cache >> 20} MiB",
        "memory unknown" if memory is None else f"{round(memory / 2**30)} GiB",
    ]
    return ", ".join(fields)


def last_cache_bytes() -> int | None:
    """Return the bytes of the last-level caches of the CPUs that this process may use (Processor).
    None: unknown.
    """
    return read_processor().last_cache_bytes


def available_memory(*, within_own_limit: bool = True) -> int | None:
    """Return how many more bytes this process can use without swapping, within the memory limit of
    its container, and `within_own_limit`. None: unknown.
    """
    import psutil

    try:
        available: int = psutil.virtual_memory().available
    except (OSError, psutil.Error):
        return None
    limits = (group_free_bytes(), own_free_bytes() if within_own_limit else None)
    return min((available, *(limit for limit in limits if limit is not None)))


def total_memory() -> int | None:
    """Return the bytes of this machine's memory. None: unknown."""
    import psutil

    try:
        total: int = psutil.virtual_memory().total
    except (OSError, psutil.Error):
        return None
    return total


def resident_memory() -> int | None:
    """Return the bytes of memory that this process occupies (RSS), including shared libraries and
    mapped files. None: unknown.
    """
    import psutil

    try:
        resident: int = psutil.Process().memory_info().rss
    except (OSError, psutil.Error):
        return None
    return resident


def _stepping() -> str:
    """Return the processor's family, model and stepping as text, or "" if they are unknown. They
    distinguish processors in virtual machines, where the name may be generic.
    """
    info = Path("/proc/cpuinfo")
    names = ("cpu family", "model", "stepping")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    fields = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return f" ({'/'.join(fields[name] for name in names)})" if fields.keys() >= set(names) else ""
