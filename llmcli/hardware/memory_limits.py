"""What this process may take of the machine's memory: a container's limit, and that of its
addresses (ulimit -v).

Control groups of Linux, version 2 and 1: every group from the process's own up to the root may have
a limit. Pages of files that a group holds are given back where something else needs room, so they
count as free.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN, SIZES = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/self/statm")
THREAD = 72 << 20  # addresses of one thread: its stack, and the C library's arena
ENDLESS = 1 << 60  # version 1 writes "no limit" as a number near 2^63
# Limit, what is held, and in memory.stat the pages of files and caches that could be had back.
FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def group_room() -> int | None:
    """Bytes that every control group of this process would still give; None where there is no
    limit.
    """
    return min(
        (room for version, folder in _groups() if (room := _room(version, folder)) is not None),
        default=None,
    )


def address_room() -> int | None:
    """Bytes that may still be mapped, a model's file among them; None where there is no limit, or
    nobody tells.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit in (resource.RLIM_INFINITY, -1):
        return None
    try:
        pages = int(SIZES.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, limit - pages * resource.getpagesize())


def _groups() -> Iterator[tuple[int, Path]]:
    """Version and folder of each control group that holds this process, as far as they can be seen
    from here.
    """
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, name = rest.partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        version, root = (1, GROUPS / "memory") if kinds else (2, GROUPS)
        place = root / name.lstrip("/")
        yield from (
            (version, folder) for folder in (place, *place.parents) if folder.is_relative_to(root)
        )


def _room(version: int, folder: Path) -> int | None:
    most, held, back = FILES[version]
    try:
        limit = int((folder / most).read_text())
        if limit >= ENDLESS:
            return None
        used = int((folder / held).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + sum(int(stat.get(name, 0)) for name in back))
    except (OSError, ValueError):  # "max": no limit here, or no group of memory
        return None
