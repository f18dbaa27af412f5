"""The memory limits of this process: the limit of its container, and the limit of its address space
(ulimit -v).

Containers use Linux control groups, version 1 or 2. The control group of the process and every
group above it may have a limit. Cached file pages count as free, because the kernel drops them when
it needs memory.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT, CGROUP_FILE, STATM_FILE = (
    Path("/sys/fs/cgroup"),
    Path("/proc/self/cgroup"),
    Path("/proc/self/statm"),
)
THREAD_BYTES = 72 << 20  # address space that a thread takes: its stack and the C library's arena
# A limit above this means "no limit", for which version 1 reports a number near 2^63.
UNLIMITED_BYTES = 1 << 60
# For each version of control groups: the file with the limit, the file with the usage, and the
# fields of memory.stat that count reclaimable bytes.
LIMIT_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def group_free_bytes() -> int | None:
    """Return how many more bytes this process may use before one of its control groups reaches its
    memory limit. None: no limit.
    """
    return min(
        (
            free
            for version, folder in _control_groups()
            if (free := _free_bytes(version, folder)) is not None
        ),
        default=None,
    )


def address_free_bytes() -> int | None:
    """Return how many more bytes of address space this process may map, for example for a model
    file. None: no limit, or unknown.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit in (resource.RLIM_INFINITY, -1):
        return None
    try:
        pages = int(STATM_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, limit - pages * resource.getpagesize())


def _control_groups() -> Iterator[tuple[int, Path]]:
    """Yield the version and the folder of each control group of this process: its own and those
    above it, as far as they are visible in the container.
    """
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


def _free_bytes(version: int, folder: Path) -> int | None:
    """Return how many more bytes a control group allows. None: no limit, or unknown. `version` and
    `folder`: as `_control_groups` yields them.
    """
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
