"""The memory limits of this process: the limit of its container, the limit of its address space
(ulimit -v), and a limit that the program sets itself.

Cached file pages of a control group count as free, because the kernel drops them when it needs
memory.
"""

import resource
from pathlib import Path

from quant.native.control_groups import SYSTEM_ROOT, ControlGroup, control_groups

STATM_FILE = Path("/proc/self/statm")
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
_own_limit_bytes: int | None = None  # see limit_own_memory


def group_free_bytes(root: Path = SYSTEM_ROOT) -> int | None:
    """Return how many more bytes this process may use before one of its control groups reaches its
    memory limit. None: no limit. `root`: the folder that contains `proc` and `sys`.
    """
    free = (_free_bytes(group) for group in control_groups("memory", root))
    return min((nbytes for nbytes in free if nbytes is not None), default=None)


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


def limit_own_memory(nbytes: int | None) -> None:
    """Set the number of bytes that this process may take, so that everything that is planned in it
    fits into them. Nothing enforces the limit. None: no limit.
    """
    global _own_limit_bytes
    _own_limit_bytes = nbytes


def own_free_bytes() -> int | None:
    """Return how many more bytes the limit of `limit_own_memory` allows. Pages of mapped files
    count as free, as in a control group. None: no limit.
    """
    if _own_limit_bytes is None:
        return None
    import psutil

    usage = psutil.Process().memory_info()
    # `shared`, which only Linux has, counts the pages of mapped files
    used: int = usage.rss - getattr(usage, "shared", 0)
    return max(0, _own_limit_bytes - used)


def _free_bytes(group: ControlGroup) -> int | None:
    """Return how many more bytes a control group allows. None: no limit, or unknown. If only its
    usage is unknown, the limit is the result.
    """
    limit_name, usage_name, reclaimable = LIMIT_FILES[group.version]
    limit, used = (_number(group.read(name)) for name in (limit_name, usage_name))
    if limit is None or limit >= UNLIMITED_BYTES:
        return None
    if used is None:
        return limit
    lines = (line.partition(" ") for line in (group.read("memory.stat") or "").splitlines())
    cached = sum(_number(value) or 0 for name, _, value in lines if name in reclaimable)
    return max(0, limit - used + cached)


def _number(text: str | None) -> int | None:
    """Return a whole number in a file of the kernel, or None for anything else, such as "max"."""
    return int(text) if text and text.isascii() and text.isdigit() else None
