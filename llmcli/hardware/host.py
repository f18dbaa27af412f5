"""This machine as the operating system tells it: cores, memory. Unknown figures are None, never
guessed.
"""

import os
import platform
import re
import subprocess
from pathlib import Path

from llmcli.hardware.memory_limits import group_room

MOST_THREADS = 512  # ggml's GGML_MAX_N_THREADS; far above it, starting them crashes the process


def cores() -> int:
    """Cores this process may use: physical ones where Linux tells, within affinity and a
    container's CPU quota.
    """
    pairs = {_core(cpu) for cpu in _allowed()}
    return max(1, min(len(pairs), _quota() or len(pairs)))


def cpus() -> int:
    """CPUs this process may use, every hardware thread counted, within affinity and a container's
    quota.
    """
    count = len(_allowed())
    return max(1, min(count, _quota() or count))


def cpu_name() -> str:
    """The processor's own name, as llama-bench prints it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def identity() -> str:
    """What a measurement of this machine holds for: processor as exactly as Linux tells it, cores,
    cache, memory.
    """
    cache, memory = last_cache(), total_memory()
    parts = [
        cpu_name() + _stepping(),
        f"{cores()} cores",
        "last cache unknown" if cache is None else f"last cache {cache >> 20} MiB",
        "memory unknown" if memory is None else f"{round(memory / 2**30)} GiB",
    ]
    return ", ".join(parts)


def last_cache() -> int | None:
    """Bytes of the largest caches of the CPUs this process may use, together; None where Linux does
    not tell.

    A virtual machine may show its host's, of which others have their part.
    """
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        kept = [one for one in (_cache(path) for path in _caches(cpu)) if one]
        if kept:
            _, shared, nbytes = max(kept)
            found[shared] = nbytes
    return sum(found.values()) or None


def available_memory() -> int | None:
    """Bytes that could be had without swapping (Linux MemAvailable, macOS vm_stat), within a
    container's limit.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return _vm_stat()
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    found = int(fields["MemAvailable"].split()[0]) * 1024
    room = group_room()
    return found if room is None else min(found, room)


def total_memory() -> int | None:
    """Bytes of memory that this machine has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def resident_memory() -> int | None:
    """Bytes of this process that are in memory now, shared libraries and mapped files among them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stepping() -> str:
    """Family, model and stepping: a virtual machine's processor may have no name that tells."""
    info = Path("/proc/cpuinfo")
    wanted = ("cpu family", "model", "stepping")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    found = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return f" ({'/'.join(found[name] for name in wanted)})" if found.keys() >= set(wanted) else ""


def _vm_stat() -> int | None:
    """macOS: the pages that are free, and those of files and caches that are given back."""
    try:
        told = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    size = re.search(r"page size of (\d+) bytes", told)
    pages = dict(re.findall(r"^Pages ([a-z]+): +(\d+)\.", told, re.MULTILINE))
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
    """Two hardware threads of one core share this name."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(cpu)


def _caches(cpu: int) -> list[Path]:
    return list(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))


def _cache(folder: Path) -> tuple[int, str, int] | None:
    """Level, the CPUs that share it, and bytes of one cache; None for one of instructions."""
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
