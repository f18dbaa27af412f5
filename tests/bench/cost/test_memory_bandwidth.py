"""The bandwidth measurement: which memory is read, and how often."""

from dataclasses import replace

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from llmcli.bench.roofline import MachineBandwidth
from llmcli.hardware import host


def test_every_thread_reads_its_part_in_every_round(monkeypatch):
    read: list[int] = []
    monkeypatch.setattr(memory_bandwidth, "_read", lambda piece: read.append(piece.nbytes))
    found = memory_bandwidth.measure_bandwidth(3 << 20, threads=3, rounds=4, seconds=0.0)
    assert (found.nbytes, found.threads, len(found.round_rates)) == (3 << 20, 3, 4)
    assert read == [1 << 20] * 3 * (
        1 + 1 + 4
    )  # once to touch it, once to see how long it takes, and the rounds
    assert all(rate > 0 for rate in found.round_rates)
    assert found.best_rate == max(found.round_rates)


def test_the_whole_piece_is_read():
    found = memory_bandwidth.measure_bandwidth(20 << 20, threads=1, rounds=1, seconds=0.0)
    assert found.nbytes == 20 << 20


def test_sizes_go_beyond_the_last_cache_and_stay_within_the_memory():
    assert memory_bandwidth.buffer_sizes(32 << 20, 64 << 30) == [16 << 20, 256 << 20, 512 << 20]
    assert memory_bandwidth.buffer_sizes(300 << 20, 64 << 30) == [150 << 20, 600 << 20, 1200 << 20]
    assert max(memory_bandwidth.buffer_sizes(300 << 20, 1 << 30)) == 256 << 20
    assert max(memory_bandwidth.buffer_sizes(None, None)) == 512 << 20


def test_the_roof_is_the_fastest_reading_beyond_the_cache_or_unknown():
    cached, slow, fast = (
        BandwidthReading(64, 2, (9.0,)),
        BandwidthReading(640, 1, (3.0,)),
        BandwidthReading(640, 2, (2.0, 4.0)),
    )
    machine = MachineBandwidth("", 100, (cached, slow, fast))
    assert machine.bandwidth == 4.0
    assert replace(machine, cache_bytes=None).bandwidth is None
    assert replace(machine, cache_bytes=400).bandwidth is None


def test_caches_shared_by_cores_count_once(tmp_path, monkeypatch):
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2")):
        for level, kind, size in ((1, "Data", 32), (1, "Instruction", 64), (3, "Unified", 1024)):
            folder = tmp_path / str(cpu) / f"index{level}{kind}"
            folder.mkdir(parents=True)
            told = {
                "type": kind,
                "level": str(level),
                "shared_cpu_list": shared,
                "size": f"{size}K",
            }
            for name, text in told.items():
                (folder / name).write_text(text + "\n")
    monkeypatch.setattr(host, "_caches", lambda cpu: sorted((tmp_path / str(cpu)).glob("index*")))
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert host.last_cache_bytes() == 2048 * 1024
    monkeypatch.setattr(host, "_caches", lambda cpu: [])
    assert host.last_cache_bytes() is None
