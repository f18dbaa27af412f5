"""Memory limits of this process: the limit of a container, and that of the address space (ulimit
-v).

Containers use Linux control groups, version 1 or 2. The process's own group and every group above
it may have a limit. The file pages of a group count as free, because the kernel drops them when it
needs memory.
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
# limits above this count as none, because version 1 reports a number near 2^63 for "no limit"
UNLIMITED_BYTES = 1 << 60
# for each version of control groups: the file of the limit, the file of the usage, and the
# reclaimable pages in memory.stat
LIMIT_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def group_free_bytes() -> int | None:
    """Return how many more bytes this process may use before a control group reaches its limit;
    None without a limit.
    """
    return min(
        (free for version, folder in _groups() if (free := _room(version, folder)) is not None),
        default=None,
    )


def address_free_bytes() -> int | None:
    """Return how many more bytes this process may map, for example a model's file; None without a
    limit or if unknown.
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
    except (OSError, ValueError):  # "max" means no limit; a missing file means no memory controller
        return None
