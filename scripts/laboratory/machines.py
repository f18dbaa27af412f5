"""Machines that people have, as planning sees them: free memory, rates of reading, devices."""

from llmcli.hardware.processor import Processor
from llmcli.planning.machine import Machine, OffloadDevice

GIB = 1 << 30


def gpu(gib: float, rate: float = 400, free: float = 0.95, kind: str = "gpu") -> OffloadDevice:
    """Return a device with `gib` GiB, of which the share `free` is free. `rate`: GB/s."""
    total = int(gib * GIB)
    return OffloadDevice(f"{kind}{gib:g}", kind, int(total * free), total, rate * 1e9)


def machine(
    cores: int,
    free_gib: float,
    rate: float,
    *devices: OffloadDevice,
    efficiency: int = 0,
    quota: float | None = None,
    nodes: int = 1,
) -> Machine:
    """Return a machine with `free_gib` GiB of free memory that is read at `rate` GB/s."""
    processor = Processor(
        cores, efficiency, 2 * cores + efficiency, quota, (cores // nodes,) * nodes, 32 << 20
    )
    return Machine(processor, int(free_gib * GIB), rate * 1e9, devices)


MACHINES = {
    "container of 300 MB": machine(2, 0.3, 20, quota=1),
    "container of 2 GB, half a CPU": machine(8, 2, 10, quota=0.5),
    "container of 8 GB, 1.5 CPUs": machine(16, 8, 15, quota=1.5),
    "single-board computer": machine(4, 6.5, 8),
    "two cores, 4 GB": machine(2, 2.8, 12),
    "two cores, 24 GB": machine(2, 22, 30),
    "hybrid laptop, 16 GB": machine(6, 11, 50, efficiency=8),
    "hybrid desktop, 64 GB": machine(8, 56, 75, efficiency=16),
    "laptop, 16 GB, GPU 4 GB": machine(8, 11, 40, gpu(4, 190)),
    "laptop, 32 GB, GPU 6 GB": machine(8, 26, 50, gpu(6, 270)),
    "desktop, 16 GB, GPU 8 GB": machine(8, 12, 50, gpu(8, 290)),
    "desktop, 32 GB, GPU 12 GB": machine(8, 27, 60, gpu(12, 360)),
    "desktop, 64 GB, GPU 16 GB": machine(12, 58, 70, gpu(16, 600)),
    "desktop, 64 GB, GPU 24 GB": machine(12, 58, 70, gpu(24, 936)),
    "desktop, 32 GB, two GPUs 24 GB": machine(16, 27, 60, gpu(24, 936), gpu(24, 936)),
    "desktop, 128 GB, GPU 32 GB": machine(16, 118, 80, gpu(32, 1790)),
    "desktop, GPUs 24 and 8 GB": machine(12, 58, 60, gpu(24, 936), gpu(8, 290)),
    "GPU in use by others": machine(8, 26, 50, gpu(24, 936, free=0.2)),
    "Apple, 16 GB": machine(4, 11, 60, gpu(16 * 0.67, 100, kind="igpu"), efficiency=4),
    "Apple, 64 GB": machine(12, 52, 220, gpu(48, 400, kind="igpu"), efficiency=4),
    "Apple, 512 GB": machine(24, 480, 400, gpu(464, 800, kind="igpu"), efficiency=8),
    "AMD with unified 128 GB": machine(16, 118, 110, gpu(96, 210, kind="igpu")),
    "server, 64 cores, 256 GB": machine(64, 240, 200),
    "server, 2 × 64 cores, 1 TB": machine(128, 980, 300, nodes=2),
    "server, four GPUs 24 GB": machine(32, 240, 150, *[gpu(24, 600)] * 4),
    "server, eight GPUs 80 GB": machine(96, 1900, 300, *[gpu(80, 3350)] * 8, nodes=2),
    "server, one GPU 80 GB": machine(32, 480, 200, gpu(80, 2000)),
    "server, one GPU 141 GB": machine(32, 120, 200, gpu(141, 4800)),
    "laptop with two workers": machine(8, 11, 50, *[gpu(16, 100, kind="rpc")] * 2),
    "desktop with a worker": machine(8, 27, 60, gpu(48, 100, kind="rpc"), gpu(12, 360)),
}
