"""Count the CPUs that this process may use, within its CPU affinity and the CPU quota of its
container (Docker, Kubernetes) or service (systemd's CPUQuota=).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quant.native.control_groups import SYSTEM_ROOT, ControlGroup, control_groups

_limits: list[int] = []  # of the blocks of limit_workers() that are running


def allowed_cpus() -> frozenset[int]:
    """Return the numbers of the CPUs (hardware threads) that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: Path = SYSTEM_ROOT) -> float | None:
    """Return how many CPUs' time this process may use, such as 1.5: the smallest quota of its
    control groups. None: no quota. `root`: the folder that contains `proc` and `sys`.
    """
    quotas = (_read_quota(group) for group in control_groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def threads_within_quota(count: int, quota: float | None) -> int:
    """Return how many of `count` threads to start under a quota of CPUs. A part of a CPU gets no
    thread, because threads that wait for one another use up the quota by waiting.
    """
    return max(1, count if quota is None else min(count, int(quota)))


def worker_count() -> int:
    """Return how many independent threads this process can keep busy, or as many as
    `limit_workers` allows at the moment.
    """
    return _limits[-1] if _limits else threads_within_quota(len(allowed_cpus()), cpu_quota())


@contextmanager
def limit_workers(threads: int) -> Iterator[None]:
    """Let worker_count() return `threads` within the block, in all threads, because the user has
    asked for so many. 0: no limit.
    """
    count = threads or worker_count()
    _limits.append(count)
    try:
        yield
    finally:
        _limits.remove(count)  # not the last one: blocks in several threads end in any order


def _read_quota(group: ControlGroup) -> float | None:
    """Return the quota of a control group in CPUs. None: no quota, or unknown."""
    if group.version == 2:
        text = group.read("cpu.max")
        values = text.split() if text else []
    else:
        values = [group.read(f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = (int(value) for value in values)
    except ValueError:  # "max", or a file that is missing, damaged or not readable
        return None
    return quota / period if quota > 0 and period > 0 else None
