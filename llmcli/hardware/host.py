"""Facts about this machine from the operating system: cores, caches and memory. Unknown values are
None.
"""

import os
import platform
import re
import subprocess
from pathlib import Path

from llmcli.hardware.memory_limits import group_free_bytes

MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS; far more threads crash the process


def core_count() -> int:
    """Return the number of cores this process may use: physical ones if known, within its CPU
    affinity and a container's quota.
    """
    pairs = {_core(cpu) for cpu in _allowed()}
    return max(1, min(len(pairs), _quota() or len(pairs)))


def cpu_count() -> int:
    """Return the number of CPUs (hardware threads) this process may use, within its affinity and a
    container's quota.
    """
    count = len(_allowed())
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
    """Return the identity for which a measurement is valid: processor, cores, last-level cache and
    memory.
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
    """Return the total bytes of the last-level caches of the CPUs this process may use; None if
    unknown.

    A virtual machine may report the cache of its host, which it shares with others.
    """
    by_cpus: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        caches = [cache for cache in (_cache(path) for path in _caches(cpu)) if cache]
        if caches:
            _, shared, nbytes = max(caches)
            by_cpus[shared] = nbytes
    return sum(by_cpus.values()) or None


def available_memory() -> int | None:
    """Return the bytes available without swapping (Linux MemAvailable, macOS vm_stat), within a
    container's limit.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return _vm_stat()
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = group_free_bytes()
    return available if limit is None else min(available, limit)


def total_memory() -> int | None:
    """Return the bytes of this machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def resident_memory() -> int | None:
    """Return the resident bytes of this process, including shared libraries and mapped files."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stepping() -> str:
    """Return family, model and stepping, since a virtual machine's processor name may be
    generic.
    """
    info = Path("/proc/cpuinfo")
    names = ("cpu family", "model", "stepping")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    fields = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return f" ({'/'.join(fields[name] for name in names)})" if fields.keys() >= set(names) else ""


def _vm_stat() -> int | None:
    """Return macOS's free pages and reclaimable file pages, in bytes."""
    try:
        output = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    size = re.search(r"page size of (\d+) bytes", output)
    pages = dict(re.findall(r"^Pages ([a-z]+): +(\d+)\.", output, re.MULTILINE))
    if not size or "free" not in pages:
        return None
    return int(size[1]) * sum(
        int(pages.get(kind, 0)) for kind in ("free", "inactive", "speculative", "purgeable")
    )


def _allowed() -> set[int]:
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )


def _core(cpu: int) -> str:
    """Return a name that the hardware threads of one core share."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(cpu)


def _caches(cpu: int) -> list[Path]:
    return list(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))


def _cache(folder: Path) -> tuple[int, str, int] | None:
    """Return the level of a cache, the CPUs that share it, and its bytes; None for an instruction
    cache.
    """
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
