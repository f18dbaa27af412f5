"""Write the files in which the Linux kernel describes another machine: CPUs, caches, memory nodes
and control groups.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CoreKind:
    """Cores of one kind. `threads`: hardware threads of each core. `capacity`: the kernel's
    cpu_capacity on ARM; None on x86. `is_atom`: efficiency cores of Intel.
    """

    count: int
    threads: int = 1
    capacity: int | None = None
    is_atom: bool = False


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write files with these paths below `root`, and return `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def write_processor(
    root: Path, kinds: Iterable[CoreKind], nodes: int = 1, cache_kib: int = 32768
) -> int:
    """Write the files of a processor below `root`, and return how many CPUs it has. Cores are spread
    evenly over the memory nodes, and each node has one last-level cache of `cache_kib` KiB.
    """
    cores = [kind for kind in kinds for _ in range(kind.count)]
    files: dict[str, str] = {}
    node_cpus: list[list[int]] = [[] for _ in range(nodes)]
    atoms: list[int] = []
    cpu = 0
    for index, kind in enumerate(cores):
        siblings = range(cpu, cpu + kind.threads)
        node = index * nodes // len(cores)
        for number in siblings:
            folder = f"sys/devices/system/cpu/cpu{number}"
            files[f"{folder}/topology/thread_siblings_list"] = _list(siblings)
            if kind.capacity is not None:
                files[f"{folder}/cpu_capacity"] = str(kind.capacity)
            node_cpus[node].append(number)
        atoms += list(siblings) if kind.is_atom else []
        cpu += kind.threads
    if atoms:
        files["sys/devices/cpu_atom/cpus"] = _list(atoms)
    for node, numbers in enumerate(node_cpus):
        files[f"sys/devices/system/node/node{node}/cpulist"] = _list(numbers)
        for number in numbers:
            cache = f"sys/devices/system/cpu/cpu{number}/cache/index3"
            files |= {
                f"{cache}/type": "Unified",
                f"{cache}/level": "3",
                f"{cache}/shared_cpu_list": _list(numbers),
                f"{cache}/size": f"{cache_kib}K",
            }
    write_files(root, files)
    return cpu


def write_quota(
    root: Path, cpus: float, version: int = 2, group: str = "/", depth: int = 0
) -> None:
    """Write the files of a CPU quota. `group`: the control group of the process, as it sees it;
    `depth`: how many levels above it the quota is set.
    """
    parts = [part for part in group.split("/") if part]
    limited = "/".join(parts[: len(parts) - depth])
    quota, period = round(cpus * 100_000), 100_000
    if version == 2:
        files = {
            "proc/self/cgroup": f"0::{group}",
            f"sys/fs/cgroup/{limited}/cpu.max": f"{quota} {period}",
        }
    else:
        mount = f"sys/fs/cgroup/cpu,cpuacct/{limited}"
        files = {
            "proc/self/cgroup": f"5:cpuacct,cpu:{group}\n0::/",
            f"{mount}/cpu.cfs_quota_us": str(quota),
            f"{mount}/cpu.cfs_period_us": str(period),
        }
    write_files(root, files)


def _list(numbers: Iterable[int]) -> str:
    """Return numbers in the form of the kernel's lists, such as "0,1,2"."""
    return ",".join(map(str, numbers))
