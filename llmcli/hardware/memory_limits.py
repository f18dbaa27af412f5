"""Memory limits of this process: those of a container and of the address space (ulimit -v).

Linux control groups of version 2 and 1: every group from the process's own up to the root may have
a limit. File pages of a group count as free, because the kernel reclaims them when needed.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT, CGROUP_FILE, STATM_FILE = (
    Path("/sys/fs/cgroup"),
    Path("/proc/self/cgroup"),
    Path("/proc/self/statm"),
)
THREAD_BYTES = 72 << 20  # address space of one thread: its stack and the C library's arena
UNLIMITED_BYTES = 1 << 60  # version 1 reports "no limit" as a number near 2^63
# for each version: limit, usage, and the reclaimable pages in memory.stat
LIMIT_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def group_free_bytes() -> int | None:
    """Return the bytes that all control groups of this process still allow; None without a
    limit.
    """
    return min(
        (free for version, folder in _groups() if (free := _room(version, folder)) is not None),
        default=None,
    )


def address_free_bytes() -> int | None:
    """Return the bytes that may still be mapped, including a model's file; None without a limit or
    if unknown.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit in (resource.RLIM_INFINITY, -1):
        return None
    try:
        pages = int(STATM_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, limit - pages * resource.getpagesize())


def _groups() -> Iterator[tuple[int, Path]]:
    """Yield the version and folder of each visible control group of this process."""
    try:
        lines = CGROUP_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, fields = line.partition(":")
        kinds, _, name = fields.partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        version, root = (1, CGROUP_ROOT / "memory") if kinds else (2, CGROUP_ROOT)
        group = root / name.lstrip("/")
        yield from (
            (version, folder) for folder in (group, *group.parents) if folder.is_relative_to(root)
        )


def _room(version: int, folder: Path) -> int | None:
    limit_name, usage_name, reclaimable = LIMIT_FILES[version]
    try:
        limit = int((folder / limit_name).read_text())
        if limit >= UNLIMITED_BYTES:
            return None
        used = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + sum(int(stat.get(name, 0)) for name in reclaimable))
    except (OSError, ValueError):  # "max": no limit, or no memory controller
        return None
