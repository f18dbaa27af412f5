#!/usr/bin/env python3
"""Plan runs of many models on many machines, and check every decision.

usage: .venv/bin/python scripts/laboratory/grid.py [--every N] [--brute-force M] [--only REGEX]

A point of the grid is a machine (machines.py), a model file (model_headers.py) and the options of a
run. For each point, planning chooses context, layers, experts, split, threads, budget of states,
rows of a pass and limit of the watchdog. The script prints each decision that takes more memory
than there is, or breaks another rule. Every M-th point is compared with the best of all placements
(brute_force.py): the objective is tokens per second times tokens of context.
"""

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.planning.machine import Machine
from llmcli.planning.placement.placement_search import (
    PROCESS_BYTES,
    PlannedPlacement,
)
from llmcli.planning.placement.plan_placement import build_search, plan_placement
from llmcli.planning.prediction.model_layout import ModelLayout, read_layout
from llmcli.planning.prediction.thread_count import choose_threads, seconds_with_threads
from llmcli.planning.resolve_options import DEFAULT_MAX_CTX
from llmcli.runtime.engine.chunk_rows import PassLimits, choose_max_rows
from llmcli.runtime.engine.watchdog import WatchedWork, limit_seconds
from llmcli.runtime.kv_cache.host_budget import HostMemory, host_budget
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header
from scripts.laboratory import brute_force
from scripts.laboratory.machines import MACHINES
from scripts.laboratory.model_headers import MODELS, LabModel, write_header

FILE_TYPES = ("Q4_K_M", "Q8_0", "F16")
# options of a run, and the number of its sequences
REQUESTS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "default": ({}, 1),
    "-c 2048": ({"ctx_size": 2048}, 1),
    "-c 32768": ({"ctx_size": 32_768}, 1),
    "16 sequences": ({}, 16),
    "-ctk q8_0 -ctv q8_0": ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 1),
    "-fa off": ({"flash_attn": "off"}, 1),
    "-ub 2048": ({"ubatch_size": 2048}, 1),
    "-ngl 0": ({"gpu_layers": "0"}, 1),
    "-ngl 20": ({"gpu_layers": "20"}, 1),
    "-cmoe": ({"cpu_moe": "all"}, 1),
    "-nkvo": ({"kv_offload": False}, 1),
    "--reproducible": ({"reproducible": True}, 1),
}
GAP_SECONDS = 0.5  # --max-gap of serve
SLOW_ROW_SECONDS = 2.0  # a model of half a token a second must not count as stuck
LEAST_SHARE = 0.9  # of the objective of the best placement
# With more layers, only some numbers of layers are tried: about this many.
TRIED_LAYERS = 16


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A machine, a model file and the options of a run."""

    machine_name: str
    machine: Machine
    model: LabModel
    header: ModelHeader = field(repr=False)
    file_type: str
    request: str

    @property
    def options(self) -> RunOptions:
        """Return the options of the run."""
        return RunOptions(**REQUESTS[self.request][0])

    @property
    def slots(self) -> int:
        """Return the number of sequences."""
        return REQUESTS[self.request][1]

    @property
    def default_size(self) -> int:
        """Return the longest context that is chosen without -c."""
        return min(self.model.context, DEFAULT_MAX_CTX) * (2 if self.slots > 1 else 1)

    def __str__(self) -> str:
        return f"{self.model.name} {self.file_type} | {self.machine_name} | {self.request}"


def grid_points(folder: Path, only: str = "") -> Iterator[GridPoint]:
    """Yield all points whose text matches the regular expression `only`. The model files are written
    to `folder`.
    """
    for model in MODELS:
        for file_type in FILE_TYPES:
            path = write_header(model, folder / f"{model.name}-{file_type}.gguf", file_type)
            header = read_header(path)
            for name, machine in MACHINES.items():
                for request in REQUESTS:
                    point = GridPoint(name, machine, model, header, file_type, request)
                    if not only or re.search(only, str(point)):
                        yield point


def plan_point(point: GridPoint) -> PlannedPlacement:
    """Return the placement that planning chooses."""
    return plan_placement(
        point.header, point.options, point.machine, point.default_size, point.slots
    )


def find_faults(point: GridPoint, planned: PlannedPlacement) -> list[str]:
    """Return what is wrong with the decisions for a point; empty if nothing is."""
    faults: list[str] = []

    def require(condition: bool, text: str) -> None:
        if not condition:
            faults.append(text)

    machine, options, layout = point.machine, point.options, read_layout(point.header)
    host, *shares = planned.memory
    free = machine.free_bytes or 0
    devices = machine.devices if shares else ()
    shared = sum(
        share.total
        for share, device in zip(shares, devices, strict=True)
        if device.shares_host_memory
    )
    if planned.can_run:
        for share, device in zip(shares, devices, strict=True):
            require(share.total <= device.usable_bytes, f"{device.name} is too small")
        must_stay = host.total - host.cached_weights + shared + PROCESS_BYTES
        require(must_stay <= free, "the host is too small")
    if planned.fits:
        require(host.total + shared + PROCESS_BYTES <= free, "the weights do not stay in memory")
    weights = sum(share.weights for share in planned.memory)
    copies = layout.tied_bytes  # a device gets a copy of the embeddings
    require(layout.nbytes <= weights <= layout.nbytes + copies, "the weights are not all placed")
    if options.ctx_size is not None:
        require(planned.n_ctx == options.ctx_size, "-c was changed")
    else:
        require(planned.n_ctx <= max(512, point.default_size), "the context is too long")
    if options.gpu_layers == "0" or not machine.devices:
        require(planned.placement.gpu_layers == 0, "layers are on no device")
    if options.gpu_layers == "20" and machine.devices:
        require(planned.placement.gpu_layers == 20, "-ngl was changed")
    if options.cpu_moe == "all" and planned.placement.gpu_layers:
        require(planned.placement.cpu_moe_layers == -1, "-cmoe was changed")
    faults += _find_time_faults(machine, layout)
    budget = host_budget(HostMemory(free, None, host.total + shared))
    require(budget == 0 or host.total + shared + budget <= free, "the states take too much")
    return faults


def best_score_share(point: GridPoint, planned: PlannedPlacement) -> float | None:
    """Return the objective of a plan as a share of the best placement's; None if none fits."""
    search, request = build_search(
        point.header, point.options, point.machine, point.default_size, point.slots
    )
    step = max(1, point.model.layers // TRIED_LAYERS)
    best = brute_force.best_plan(search, request, step, 1024)
    if best is None:
        return None if not planned.fits else 1.0
    return planned.score / best.score if planned.fits else 0.0


def _find_time_faults(machine: Machine, layout: ModelLayout) -> list[str]:
    """Return what is wrong with the numbers of threads and rows."""
    faults = []
    threads = choose_threads(machine.processor, layout)
    usable = machine.processor.usable_cores
    times = [seconds_with_threads(machine.processor, layout, n) for n in range(1, usable + 1)]
    if not 1 <= threads <= usable or times[threads - 1] * LEAST_SHARE > min(times):
        faults.append(f"{threads} threads on {usable} cores")
    row_seconds = layout.bytes_per_token / machine.host_rate / 8  # a row in a pass of many rows
    rows = choose_max_rows(PassLimits(2048, 512, GAP_SECONDS, row_seconds, 1, uses_tiles=True))
    if rows * row_seconds > 1.5 * GAP_SECONDS and rows > 64:
        faults.append(f"a pass of {rows} rows takes {rows * row_seconds:.1f} s")
    for seconds in (0.0, row_seconds, SLOW_ROW_SECONDS):
        if limit_seconds(WatchedWork(rows, seconds)) <= rows * (seconds or SLOW_ROW_SECONDS):
            faults.append(f"the watchdog ends a pass of {rows} rows of {seconds} s")
    return faults


def main() -> int:
    """Check the points, and print the faults and the shares of the best placements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="check every N-th point")
    parser.add_argument("--brute-force", type=int, default=50, help="compare every M-th of these")
    parser.add_argument("--only", default="", help="regular expression of points")
    args = parser.parse_args()
    n_points = n_fit = n_faults = 0
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        for number, point in enumerate(grid_points(Path(folder), args.only)):
            if number % args.every:
                continue
            planned = plan_point(point)
            n_points += 1
            n_fit += planned.fits
            for fault in find_faults(point, planned):
                n_faults += 1
                print(f"{point}: {fault}", flush=True)
            if n_points % args.brute_force == 0:
                share = best_score_share(point, planned)
                if share is not None:
                    shares.append(share)
                    if share < LEAST_SHARE:
                        n_faults += 1
                        print(f"{point}: {share:.3f} of the best placement", flush=True)
    print(f"{n_points:,} points, {n_fit:,} of them fit; {n_faults} faults")
    if shares:
        print(
            f"compared with all placements: {len(shares)} points, least {min(shares):.3f}, "
            f"median {statistics.median(shares):.3f} of the best"
        )
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
