"""Ask the operating system about this machine: cores, caches and memory. None means unknown.

Cores and caches are read from sysfs, because only the CPUs that this process may use must count.
psutil would count all CPUs of the machine.
"""

import os
import platform
from pathlib import Path

from llmcli.hardware.memory_limits import group_free_bytes

MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS; with more threads the process crashes


def core_count() -> int:
    """Return how many physical cores this process may use, within its CPU affinity and the CPU
    quota of its container. Hardware threads are counted if the system does not report cores.
    """
    count = _physical_cores()
    return max(1, min(count, _quota() or count))


def cpu_count() -> int:
    """Return how many CPUs (hardware threads) this process may use, within its CPU affinity and the
    CPU quota of its container.
    """
    count = len(_allowed_cpus())
    return max(1, min(count, _quota() or count))


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
    """Return the total bytes of the last-level caches of the CPUs that this process may use. None:
    unknown.

    In a virtual machine this may be the cache of the physical machine, which is shared with other
    virtual machines.
    """
    by_cpus: dict[str, int] = {}  # bytes of each cache, so that a shared cache counts once
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        caches = [cache for cache in (_read_cache(path) for path in _cache_folders(cpu)) if cache]
        if caches:
            _, cache_id, nbytes = max(caches)
            by_cpus[cache_id] = nbytes
    return sum(by_cpus.values()) or None


def available_memory() -> int | None:
    """Return how many more bytes this process can use without swapping, within the memory limit of
    its container. None: unknown.
    """
    import psutil

    try:
        available: int = psutil.virtual_memory().available
    except (OSError, psutil.Error):
        return None
    limit = group_free_bytes()
    return available if limit is None else min(available, limit)


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


def _allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may run on."""
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )


def _physical_cores() -> int:
    """Return the number of physical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len({_core_name(cpu) for cpu in os.sched_getaffinity(0)})
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _core_name(cpu: int) -> str:
    """Return a name for the physical core of a CPU. All hardware threads of a core get the same
    name.
    """
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(cpu)


def _cache_folders(cpu: int) -> list[Path]:
    """Return the sysfs folders of the caches that a CPU uses, one for each cache."""
    return list(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))


def _read_cache(folder: Path) -> tuple[int, str, int] | None:
    """Return a cache's level, a text that identifies the cache, and its bytes. Return None for an
    instruction cache, and for a folder that cannot be read.
    """
    try:
        kind, level, cpus, size = (
            (folder / name).read_text().strip()
            for name in ("type", "level", "shared_cpu_list", "size")
        )
    except OSError:
        return None
    if kind == "Instruction" or not size.endswith("K"):
        return None
    return int(level), f"{level}:{cpus}", int(size[:-1]) * 1024


def _quota() -> int | None:
    """Return the CPU quota of the container (control group version 2) in CPUs, rounded up. None: no
    quota, or unknown.
    """
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, -(-int(quota) // int(period)))
