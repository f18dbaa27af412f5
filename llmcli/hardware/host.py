"""Facts about this machine from the operating system: cores, caches and memory. None means unknown.

Cores and caches are read from sysfs, because only the CPUs that this process may use must count.
psutil counts all CPUs of the machine.
"""

import os
import platform
from pathlib import Path

from llmcli.hardware.memory_limits import group_free_bytes

MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS; far more threads crash the process


def core_count() -> int:
    """Return how many cores this process may use, considering its CPU affinity and the quota of a
    container. These are physical cores if the system reports them, otherwise hardware threads.
    """
    count = _physical_cores()
    return max(1, min(count, _quota() or count))


def cpu_count() -> int:
    """Return how many CPUs (hardware threads) this process may use, considering its CPU affinity
    and the quota of a container.
    """
    count = len(_allowed())
    return max(1, min(count, _quota() or count))


def cpu_name() -> str:
    """Return the processor's name in the form that llama-bench prints."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_identity() -> str:
    """Return a text that identifies this machine: processor, cores, last-level cache and memory. A
    saved measurement is valid only on the machine with the same text.
    """
    cache, memory = last_cache_bytes(), total_memory()
    parts = [
        cpu_name() + _stepping(),
        f"{core_count()} cores",
        "last cache unknown" if cache is None else f"last cache {cache >> 20} MiB",
        "memory unknown" if memory is None else f"{round(memory / 2**30)} GiB",
    ]
    return ", ".join(parts)


def last_cache_bytes() -> int | None:
    """Return the total size in bytes of the last-level caches that belong to the CPUs this process
    may use; None if unknown.

    In a virtual machine, this may be the cache of the physical machine, which other virtual
    machines use, too.
    """
    by_cpus: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        caches = [cache for cache in (_cache(path) for path in _caches(cpu)) if cache]
        if caches:
            _, shared, nbytes = max(caches)
            by_cpus[shared] = nbytes
    return sum(by_cpus.values()) or None


def available_memory() -> int | None:
    """Return how many bytes this process can use without swapping, within the limit of a container;
    None if unknown.
    """
    import psutil

    try:
        available: int = psutil.virtual_memory().available
    except (OSError, psutil.Error):
        return None
    limit = group_free_bytes()
    return available if limit is None else min(available, limit)


def total_memory() -> int | None:
    """Return the bytes of this machine's memory; None if unknown."""
    import psutil

    try:
        total: int = psutil.virtual_memory().total
    except (OSError, psutil.Error):
        return None
    return total


def resident_memory() -> int | None:
    """Return the bytes of memory that this process occupies, including shared libraries and mapped
    files; None if unknown.
    """
    import psutil

    try:
        resident: int = psutil.Process().memory_info().rss
    except (OSError, psutil.Error):
        return None
    return resident


def _stepping() -> str:
    """Return the processor's family, model and stepping as text. They tell processors apart in
    virtual machines, where the name may be generic.
    """
    info = Path("/proc/cpuinfo")
    names = ("cpu family", "model", "stepping")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    fields = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return f" ({'/'.join(fields[name] for name in names)})" if fields.keys() >= set(names) else ""


def _allowed() -> set[int]:
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )


def _physical_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len({_core(cpu) for cpu in os.sched_getaffinity(0)})
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _core(cpu: int) -> str:
    """Return a name of a CPU's core, which is the same for all hardware threads of this core."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(cpu)


def _caches(cpu: int) -> list[Path]:
    return list(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))


def _cache(folder: Path) -> tuple[int, str, int] | None:
    """Return a cache's level, the CPUs that share it, and its bytes; None for an instruction cache."""
    try:
        kind, level, shared, size = (
            (folder / name).read_text().strip()
            for name in ("type", "level", "shared_cpu_list", "size")
        )
    except OSError:
        return None
    if kind == "Instruction" or not size.endswith("K"):
        return None
    return int(level), f"{level}:{shared}", int(size[:-1]) * 1024


def _quota() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, -(-int(quota) // int(period)))
