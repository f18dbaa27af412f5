"""Memory limits of containers and of the address space, read from fake files of the kernel."""

import sys
from pathlib import Path

import psutil
import pytest

from llmcli.hardware import host, memory_limits
from scripts.laboratory.kernel_files import write_files


def write_group(
    folder: Path, names: tuple[str, str], values: tuple[str, str], stat: str = "anon 5\n"
) -> None:
    """Write the files of a control group: those called `names`, and memory.stat."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (*values, stat), strict=True):
        (folder / name).write_text(value)


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_smallest_free_memory_of_all_groups_counts_and_file_pages_are_free(
    tmp_path: Path,
) -> None:
    write_files(tmp_path, {"proc/self/cgroup": "0::/user/app\n"})
    write_group(tmp_path / "sys/fs/cgroup/user/app", V2, ("max\n", "900\n"))
    assert memory_limits.group_free_bytes(tmp_path) is None
    write_group(
        tmp_path / "sys/fs/cgroup/user",
        V2,
        ("1000\n", "900\n"),
        "anon 500\ninactive_file 250\nactive_file 100\nshmem 9\n",
    )
    assert memory_limits.group_free_bytes(tmp_path) == 450
    write_group(tmp_path / "sys/fs/cgroup", V2, ("400\n", "390\n"))
    assert memory_limits.group_free_bytes(tmp_path) == 10
    write_group(tmp_path / "sys/fs/cgroup", V2, ("400\n", "500\n"))
    assert memory_limits.group_free_bytes(tmp_path) == 0


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/self/cgroup": "4:memory:/box\n3:cpuset:/box\n0::/\n"})
    root = tmp_path / "sys/fs/cgroup/memory"
    write_group(root, V1, ("9223372036854771712\n", "100\n"))
    assert memory_limits.group_free_bytes(tmp_path) is None
    write_group(root / "box", V1, ("1000\n", "700\n"), "total_inactive_file 50\ninactive_file 7\n")
    assert memory_limits.group_free_bytes(tmp_path) == 350


def test_root_group_counts_in_a_container_that_sees_the_path_on_the_host(
    tmp_path: Path,
) -> None:
    write_files(tmp_path, {"proc/self/cgroup": "4:memory:/docker/0123\n"})
    write_group(tmp_path / "sys/fs/cgroup/memory", V1, ("1000\n", "700\n"))
    assert memory_limits.group_free_bytes(tmp_path) == 300


def test_without_readable_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limits.group_free_bytes(tmp_path) is None
    write_files(tmp_path, {"proc/self/cgroup": "0::/\n"})
    assert memory_limits.group_free_bytes(tmp_path) is None
    write_group(tmp_path / "sys/fs/cgroup", V2, ("garbage\n", "x\n"))
    assert memory_limits.group_free_bytes(tmp_path) is None


def test_a_limit_whose_usage_may_not_be_read_is_a_limit(tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "1000"})
    (tmp_path / "sys/fs/cgroup/memory.current").mkdir()  # reading fails for root, too
    assert memory_limits.group_free_bytes(tmp_path) == 1000


def test_available_memory_is_within_the_limit_of_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("no /proc here")
    assert host.available_memory()
    monkeypatch.setattr(host, "group_free_bytes", lambda: 12345)
    assert host.available_memory() == 12345
    monkeypatch.setattr(host, "group_free_bytes", lambda: 1 << 60)
    assert (host.available_memory() or 0) > 12345


def test_memory_is_unknown_if_the_system_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise FileNotFoundError("/proc/meminfo")

    assert 0 < (host.available_memory() or 0) <= (host.total_memory() or 0)
    monkeypatch.setattr(psutil, "virtual_memory", fail)
    assert host.available_memory() is None
    assert host.total_memory() is None


def test_free_address_space_is_none_without_a_limit_or_without_proc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resource = memory_limits.resource
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert memory_limits.address_free_bytes() is None
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 40, 1 << 40))
    if sys.platform.startswith("linux"):
        assert 0 < (memory_limits.address_free_bytes() or 0) < 1 << 40
    monkeypatch.setattr(memory_limits, "STATM_FILE", tmp_path / "none")
    assert memory_limits.address_free_bytes() is None
