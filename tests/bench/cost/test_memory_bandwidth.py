"""The measurement of the memory bandwidth: buffer sizes, reads, and which reading is used."""

from dataclasses import replace

from llmcli.bench.cost import memory_bandwidth
from llmcli.bench.cost.memory_bandwidth import BandwidthReading
from llmcli.bench.roofline import MachineBandwidth
from llmcli.hardware.processor import read_processor
from scripts.laboratory.kernel_files import write_files


def test_every_thread_reads_its_segment_in_every_round(monkeypatch):
    read_sizes: list[int] = []
    monkeypatch.setattr(
        memory_bandwidth, "_read", lambda segment: read_sizes.append(segment.nbytes)
    )
    reading = memory_bandwidth.measure_bandwidth(3 << 20, threads=3, rounds=4, seconds=0.0)
    assert (reading.nbytes, reading.threads, len(reading.round_rates)) == (3 << 20, 3, 4)
    # one read to allocate the memory, one to estimate the duration, and four rounds
    assert read_sizes == [1 << 20] * 3 * (1 + 1 + 4)
    assert all(rate > 0 for rate in reading.round_rates)
    assert reading.best_rate == max(reading.round_rates)


def test_the_reading_covers_the_whole_buffer():
    reading = memory_bandwidth.measure_bandwidth(20 << 20, threads=1, rounds=1, seconds=0.0)
    assert reading.nbytes == 20 << 20


def test_buffer_sizes_exceed_the_cache_but_not_the_memory():
    assert memory_bandwidth.buffer_sizes(32 << 20, 64 << 30) == [16 << 20, 256 << 20, 512 << 20]
    assert memory_bandwidth.buffer_sizes(300 << 20, 64 << 30) == [150 << 20, 600 << 20, 1200 << 20]
    assert max(memory_bandwidth.buffer_sizes(300 << 20, 1 << 30)) == 256 << 20
    assert max(memory_bandwidth.buffer_sizes(None, None)) == 512 << 20


def test_the_bandwidth_is_the_fastest_reading_beyond_the_cache():
    cached, slow, fast = (
        BandwidthReading(64, 2, (9.0,)),
        BandwidthReading(640, 1, (3.0,)),
        BandwidthReading(640, 2, (2.0, 4.0)),
    )
    machine = MachineBandwidth("", 100, (cached, slow, fast))
    assert machine.bandwidth == 4.0
    assert replace(machine, cache_bytes=None).bandwidth is None
    assert replace(machine, cache_bytes=400).bandwidth is None


def test_caches_that_cores_share_are_counted_once(tmp_path):
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2")):
        for level, kind, size in ((1, "Data", 32), (1, "Instruction", 64), (3, "Unified", 1024)):
            folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{level}{kind}"
            files = {
                "type": kind,
                "level": str(level),
                "shared_cpu_list": shared,
                "size": f"{size}K",
            }
            write_files(tmp_path, {f"{folder}/{name}": text for name, text in files.items()})
    assert read_processor(tmp_path, {0, 1, 2}, "Linux").last_cache_bytes == 2048 * 1024
    assert read_processor(tmp_path, {3}, "Linux").last_cache_bytes is None
