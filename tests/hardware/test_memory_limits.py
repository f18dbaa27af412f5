"""Memory within a container's limit and without /proc, read from fake kernel files."""

import sys
from pathlib import Path

import psutil
import pytest

from llmcli.hardware import host, memory_limits


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory_limits, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limits, "CGROUP_FILE", tmp_path / "own")
    return tmp_path


def group(
    folder: Path, names: tuple[str, str], values: tuple[str, str], stat: str = "anon 5\n"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (*values, stat), strict=True):
        (folder / name).write_text(value)


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_the_tightest_group_counts_and_pages_of_files_are_free(groups: Path) -> None:
    (groups / "own").write_text("0::/user/app\n")
    group(groups / "cgroup/user/app", V2, ("max\n", "900\n"))
    assert memory_limits.group_free_bytes() is None
    group(
        groups / "cgroup/user",
        V2,
        ("1000\n", "900\n"),
        "anon 500\ninactive_file 250\nactive_file 100\nshmem 9\n",
    )
    assert memory_limits.group_free_bytes() == 450
    group(groups / "cgroup", V2, ("400\n", "390\n"))
    assert memory_limits.group_free_bytes() == 10
    group(groups / "cgroup", V2, ("400\n", "500\n"))
    assert memory_limits.group_free_bytes() == 0


def test_version_one_has_a_tree_of_its_own_and_a_number_for_no_limit(groups: Path) -> None:
    (groups / "own").write_text("4:memory:/box\n3:cpuset:/box\n0::/\n")
    root = groups / "cgroup/memory"
    group(root, V1, ("9223372036854771712\n", "100\n"))
    assert memory_limits.group_free_bytes() is None
    group(root / "box", V1, ("1000\n", "700\n"), "total_inactive_file 50\ninactive_file 7\n")
    assert memory_limits.group_free_bytes() == 350


def test_in_a_container_that_shows_the_host_s_path_its_own_group_is_the_root(groups: Path) -> None:
    (groups / "own").write_text("4:memory:/docker/0123\n")
    group(groups / "cgroup/memory", V1, ("1000\n", "700\n"))
    assert memory_limits.group_free_bytes() == 300


def test_no_groups_no_limit(groups: Path) -> None:
    assert memory_limits.group_free_bytes() is None
    (groups / "own").write_text("0::/\n")
    assert memory_limits.group_free_bytes() is None
    group(groups / "cgroup", V2, ("garbage\n", "x\n"))
    assert memory_limits.group_free_bytes() is None


def test_the_container_s_limit_bounds_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("no /proc here")
    whole = host.available_memory()
    assert whole
    monkeypatch.setattr(host, "group_free_bytes", lambda: 12345)
    assert host.available_memory() == 12345
    monkeypatch.setattr(host, "group_free_bytes", lambda: 1 << 60)
    assert (host.available_memory() or 0) > 12345


def test_memory_that_the_system_hides_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FileNotFoundError("/proc/meminfo")

    assert 0 < (host.available_memory() or 0) <= (host.total_memory() or 0)
    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    assert host.available_memory() is None
    assert host.total_memory() is None


def test_addresses_without_a_limit_or_without_proc_are_unknown(
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
