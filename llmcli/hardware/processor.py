"""The processor of this machine as far as this process may use it: cores, memory nodes, caches and
quota.

Hybrid processors have performance cores and efficiency cores. Threads of llama.cpp wait for one
another after each operation, so that a slow core slows down all of them. llama.cpp therefore leaves
efficiency cores out (common/common.cpp, common_cpu_get_num_math), and so does `llmcli`.

Cores and caches are read from sysfs, because only the CPUs that this process may use must count;
psutil would count all of them. `root` is the folder that contains `proc` and `sys`; tests pass a
folder with files of another machine.
"""

import functools
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quant.native.control_groups import SYSTEM_ROOT
from quant.native.processors import allowed_cpus, cpu_quota, threads_within_quota

# A core whose capacity is less than this share of the fastest core's is an efficiency core (ARM).
EFFICIENCY_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPUs that this process may use.

    - `performance_cores`, `efficiency_cores`: physical cores of each kind. A processor with one kind
      of cores has only performance cores.
    - `cpus`: hardware threads.
    - `quota`: how many CPUs' time the process may use, such as 1.5; None: no limit.
    - `node_cores`: the performance cores of each memory node (NUMA). One node if it is unknown.
    - `last_cache_bytes`: bytes of the last-level caches together; None: unknown. In a virtual
      machine this may be the cache of the physical machine, which is shared with others.
    """

    performance_cores: int
    efficiency_cores: int
    cpus: int
    quota: float | None = None
    node_cores: tuple[int, ...] = ()
    last_cache_bytes: int | None = None

    @property
    def usable_cores(self) -> int:
        """Return how many threads of llama.cpp can compute at once at full speed: one for each
        performance core, within the quota.
        """
        return threads_within_quota(self.performance_cores or self.efficiency_cores, self.quota)

    @property
    def usable_cpus(self) -> int:
        """Return how many hardware threads the quota leaves."""
        return threads_within_quota(self.cpus, self.quota)


def read_processor(
    root: Path = SYSTEM_ROOT, cpus: Iterable[int] | None = None, system: str = platform.system()
) -> Processor:
    """Read the processor from the files of the operating system. `cpus`: the numbers of the CPUs
    that this process may use; by default the operating system is asked.
    """
    numbers = allowed_cpus() if cpus is None else frozenset(cpus)
    return replace(_read_cores(root, numbers, system), quota=cpu_quota(root))


@functools.cache
def _read_cores(root: Path, numbers: frozenset[int], system: str) -> Processor:
    """Read what does not change while the process runs: everything but the quota."""
    if system == "Darwin":
        return _read_macos(len(numbers))
    folder = root / "sys/devices/system/cpu"
    efficient = _efficiency_cpus(root, folder, numbers)
    cores = {_core_name(folder, cpu) for cpu in numbers - efficient}
    efficient_cores = {_core_name(folder, cpu) for cpu in efficient} - cores
    nodes = (
        {_core_name(folder, cpu) for cpu in (numbers - efficient) & node_cpus}
        for node_cpus in _node_cpus(root)
    )
    return Processor(
        len(cores),
        len(efficient_cores),
        len(numbers),
        None,
        tuple(len(node) for node in nodes if node) or (len(cores) or len(efficient_cores),),
        _last_cache_bytes(folder, numbers),
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers in a list of the kernel, such as "0-3,8". Parts that are not understood are
    left out.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _efficiency_cpus(root: Path, folder: Path, cpus: frozenset[int]) -> frozenset[int]:
    """Return which of `cpus` belong to efficiency cores: on Intel those of the device `cpu_atom`,
    on ARM those of a clearly lower capacity. None of them if all are of one kind.
    """
    efficient = parse_cpu_list(_read(root / "sys/devices/cpu_atom/cpus")) & cpus
    if not efficient:
        texts = {cpu: _read(folder / f"cpu{cpu}/cpu_capacity") for cpu in cpus}
        capacities = {cpu: int(text) for cpu, text in texts.items() if text.isdecimal()}
        limit = EFFICIENCY_SHARE * max(capacities.values(), default=0)
        efficient = frozenset(cpu for cpu, capacity in capacities.items() if capacity < limit)
    return efficient if efficient < cpus else frozenset()


def _core_name(folder: Path, cpu: int) -> str:
    """Return a name for the physical core of a CPU. All hardware threads of a core get the same
    name.
    """
    return _read(folder / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _node_cpus(root: Path) -> list[frozenset[int]]:
    """Return the CPUs of each memory node."""
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return [parse_cpu_list(_read(folder / "cpulist")) for folder in folders]


def _last_cache_bytes(folder: Path, cpus: frozenset[int]) -> int | None:
    """Return the bytes of the last-level caches of `cpus` together. None: unknown."""
    by_cpus: dict[str, int] = {}  # bytes of each cache, so that a shared cache counts once
    for cpu in cpus:
        caches = [_read_cache(path) for path in (folder / f"cpu{cpu}/cache").glob("index*")]
        if known := [cache for cache in caches if cache]:
            _, cache_id, nbytes = max(known)
            by_cpus[cache_id] = nbytes
    return sum(by_cpus.values()) or None


def _read_cache(folder: Path) -> tuple[int, str, int] | None:
    """Return a cache's level, a text that identifies the cache, and its bytes. Return None for an
    instruction cache, and for a folder that cannot be read.
    """
    kind, level, cpus, size = (
        _read(folder / name) for name in ("type", "level", "shared_cpu_list", "size")
    )
    if kind in ("", "Instruction") or not level.isdecimal() or not size[:-1].isdecimal():
        return None
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(level), f"{level}:{cpus}", int(size[:-1]) * units.get(size[-1], 0)


def _read_macos(n_cpus: int) -> Processor:
    """Read the processor on macOS from sysctl. Processors with one kind of cores have no levels of
    performance.
    """
    performance, efficiency, cores, cache = (
        _read_sysctl(name)
        for name in (
            "hw.perflevel0.physicalcpu",
            "hw.perflevel1.physicalcpu",
            "hw.physicalcpu",
            "hw.l3cachesize",
        )
    )
    count = performance or cores or os.cpu_count() or 1
    return Processor(count, efficiency or 0, n_cpus, None, (count,), cache)


def _read_sysctl(name: str) -> int | None:
    """Return a number that sysctl reports on macOS, or None."""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return int(done.stdout) if done.stdout.strip().isdecimal() else None


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
