"""Cores and quotas of other machines, read from files of the kernel."""

import os
import platform
from pathlib import Path

import psutil
import pytest

from llmcli.hardware import host, processor
from llmcli.hardware.processor import Processor, parse_cpu_list, read_processor
from scripts.laboratory.kernel_files import CoreKind, write_files, write_processor, write_quota


def read(root: Path, count: int, system: str = "Linux") -> Processor:
    return read_processor(root, range(count), system)


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    count = write_processor(tmp_path, [CoreKind(8, threads=2)])
    found = read(tmp_path, count)
    assert (found.performance_cores, found.efficiency_cores, found.cpus) == (8, 0, 16)
    assert (found.usable_cores, found.usable_cpus) == (8, 16)
    assert found.last_cache_bytes == 32 << 20


@pytest.mark.parametrize(
    "kinds",
    [
        [CoreKind(8, threads=2), CoreKind(16, is_atom=True)],  # Intel Core i9
        [CoreKind(4, capacity=1024), CoreKind(4, capacity=400)],  # big.LITTLE
        [CoreKind(1, capacity=1024), CoreKind(3, capacity=870), CoreKind(4, capacity=300)],
    ],
)
def test_efficiency_cores_get_no_thread(tmp_path: Path, kinds: list[CoreKind]) -> None:
    count = write_processor(tmp_path, kinds)
    found = read(tmp_path, count)
    assert found.efficiency_cores == kinds[-1].count
    assert found.usable_cores == sum(kind.count for kind in kinds[:-1])
    assert found.cpus == count


def test_a_process_that_may_only_use_efficiency_cores_uses_them(tmp_path: Path) -> None:
    write_processor(tmp_path, [CoreKind(2), CoreKind(4, is_atom=True)])
    assert read_processor(tmp_path, range(2, 6), "Linux").usable_cores == 4


def test_only_the_cpus_of_the_affinity_count(tmp_path: Path) -> None:
    write_processor(tmp_path, [CoreKind(8, threads=2)], nodes=2)
    found = read_processor(tmp_path, {0, 1, 2, 14}, "Linux")
    assert (found.performance_cores, found.cpus, found.node_cores) == (3, 4, (2, 1))


def test_each_memory_node_has_its_cores_and_cache(tmp_path: Path) -> None:
    count = write_processor(tmp_path, [CoreKind(128)], nodes=4, cache_kib=65536)
    found = read(tmp_path, count)
    assert found.node_cores == (32, 32, 32, 32)
    assert found.last_cache_bytes == 256 << 20


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("group", "depth"), [("/", 0), ("/box", 0), ("/a/b/c", 1), ("/a/b", 2)])
@pytest.mark.parametrize(("cpus", "threads"), [(0.5, 1), (1, 1), (1.5, 1), (3, 3), (100, 8)])
def test_a_quota_of_any_group_above_the_process_limits_threads(
    tmp_path: Path, version: int, group: str, depth: int, cpus: float, threads: int
) -> None:
    count = write_processor(tmp_path, [CoreKind(8)])
    write_quota(tmp_path, cpus, version, group, depth)
    found = read(tmp_path, count)
    assert found.quota == cpus
    assert found.usable_cores == found.usable_cpus == threads


def test_a_quota_is_found_where_a_container_sees_the_name_of_its_host(tmp_path: Path) -> None:
    count = write_processor(tmp_path, [CoreKind(8)])
    write_files(
        tmp_path,
        {"proc/self/cgroup": "0::/../../docker/0123", "sys/fs/cgroup/cpu.max": "200000 100000"},
    )
    assert read(tmp_path, count).usable_cores == 2


@pytest.mark.parametrize("text", ["max 100000", "", "1", "x y", "-1 100000", "100000 0", "\x00"])
def test_a_file_that_sets_no_quota_limits_nothing(tmp_path: Path, text: str) -> None:
    count = write_processor(tmp_path, [CoreKind(4)])
    write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": text})
    assert read(tmp_path, count).usable_cores == 4


def test_a_file_of_a_quota_that_may_not_be_read_limits_nothing(tmp_path: Path) -> None:
    count = write_processor(tmp_path, [CoreKind(4)])
    write_files(tmp_path, {"proc/self/cgroup": "0::/"})
    (tmp_path / "sys/fs/cgroup/cpu.max").mkdir(parents=True)  # reading fails for root, too
    assert read(tmp_path, count).usable_cores == 4


def test_without_files_each_cpu_is_a_core(tmp_path: Path) -> None:
    found = read(tmp_path, 6)
    assert (found.performance_cores, found.node_cores, found.last_cache_bytes) == (6, (6,), None)


def test_macos_leaves_efficiency_cores_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = {"hw.perflevel0.physicalcpu": 8, "hw.perflevel1.physicalcpu": 4, "hw.physicalcpu": 12}
    monkeypatch.setattr(processor, "_read_sysctl", numbers.get)
    found = read(tmp_path / "arm", 12, "Darwin")
    assert (found.usable_cores, found.efficiency_cores, found.usable_cpus) == (8, 4, 12)
    monkeypatch.setattr(processor, "_read_sysctl", {"hw.physicalcpu": 6}.get)  # Intel
    assert read(tmp_path / "intel", 12, "Darwin").usable_cores == 6


def test_lists_of_the_kernel() -> None:
    assert parse_cpu_list("0-3,8") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("") == parse_cpu_list("x-1,-") == frozenset()


@pytest.mark.skipif(platform.system() != "Linux", reason="psutil is the reference on Linux")
def test_this_machine_has_the_cores_that_psutil_counts() -> None:
    found = read_processor()
    if found.cpus == os.cpu_count():
        cores = psutil.cpu_count(logical=False)
        assert found.performance_cores + found.efficiency_cores == (cores or found.cpus)
    assert 1 <= host.core_count() <= host.cpu_count() <= found.cpus
