#!/usr/bin/env python3
"""Compare predicted memory with llama.cpp's own dry run, for files of real models without weights.

usage: .venv/bin/python scripts/laboratory/dry_runs.py [--only REGEX] [--workers 2] [--verbose]

The devices are workers on this machine (llmcli worker), which llama.cpp treats as GPUs. Predicted
weights and KV cache must equal those of the dry run on every device, and predicted buffers must be
at least as large. The script prints by how much they are larger.
"""

import argparse
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.errors import UserError
from llmcli.hardware import rpc_workers
from llmcli.planning.dry_runs.memory_plan import open_memory_planner
from llmcli.planning.machine import offload_devices
from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer
from llmcli.planning.prediction.memory_prediction import (
    PredictedMemory,
    distribute,
    predict_memory,
    split_for_counts,
)
from llmcli.planning.prediction.model_layout import ModelLayout, read_layout
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.devices import HOST_DEVICE, list_devices
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header
from scripts.laboratory.model_headers import MODELS, write_header

CONTEXTS = (
    ContextOptions(512),
    ContextOptions(8192),
    ContextOptions(65_536),
    ContextOptions(8192, n_ubatch=32),
    ContextOptions(8192, n_ubatch=2048),
    ContextOptions(8192, flash_attn="off"),
    ContextOptions(8192, n_seq_max=16, n_outputs=16),
    ContextOptions(32_768, type_k="q8_0", type_v="q8_0"),
)
ROOT = Path(__file__).parents[2]
LLMCLI = (sys.executable, "-m", "llmcli.app")  # of this checkout
READY = re.compile(r"(127\.0\.0\.1:\d+)")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and reported bytes on a device. `copied`: embeddings that are also the output matrix,
    of which a host has a copy only if it repacks them.
    """

    what: str
    device: str
    predicted: PredictedMemory
    copied: int
    weights: int
    kv: int
    compute: int

    @property
    def fault(self) -> str:
        """Return how the prediction is wrong; "" if it is not."""
        wrong = []
        extra = self.predicted.weights - self.weights
        if extra and not (self.device == HOST_DEVICE and extra == self.copied):
            wrong.append(f"weights {self.predicted.weights:,} instead of {self.weights:,}")
        if self.predicted.kv != self.kv:
            wrong.append(f"KV cache {self.predicted.kv:,} instead of {self.kv:,}")
        if self.predicted.compute < self.compute:
            wrong.append(f"buffers {self.predicted.compute:,} for {self.compute:,}")
        return ", ".join(wrong)


def placements(layout: ModelLayout, n_devices: int) -> Iterator[tuple[str, ModelPlacement]]:
    """Yield placements with their names."""
    n_parts = len(layout.layers) + 1
    yield "host", ModelPlacement(0)
    if not n_devices:
        return
    yield "one device", ModelPlacement(-1, split_for_counts([n_parts] + [0] * (n_devices - 1)))
    yield (
        "a third",
        ModelPlacement(n_parts // 3, split_for_counts([n_parts // 3] + [0] * (n_devices - 1))),
    )
    if n_devices > 1:
        first = n_parts * 2 // 5
        yield "two devices", ModelPlacement(-1, split_for_counts((first, n_parts - first)))
        yield "by free memory", ModelPlacement(n_parts * 3 // 4)
    if layout.has_experts:
        yield (
            "experts of half on the host",
            ModelPlacement(
                -1, split_for_counts([n_parts] + [0] * (n_devices - 1)), cpu_moe_layers=n_parts // 2
            ),
        )


def compare(header: ModelHeader, devices: list[tuple[str, int]]) -> Iterator[Comparison]:
    """Yield the comparisons for a model. `devices`: name and free bytes of each device."""
    layout = read_layout(header)
    for name, placement in placements(layout, len(devices)):
        distribution = distribute(placement, len(layout.layers), [free for _, free in devices])
        contexts = CONTEXTS if name == "host" else CONTEXTS[:3]
        with open_memory_planner(header, contexts[0], placement) as planner:
            for options in contexts:
                cache = cache_bytes_by_layer(header, options)
                if cache is None:
                    continue
                predicted = predict_memory(layout, cache, options, distribution, len(devices))
                try:
                    reported = {share.device: share for share in planner.device_memory(options)}
                except UserError:  # this model does not support these cache types
                    continue
                names = [HOST_DEVICE, *(device for device, _ in devices)]
                for device, memory in zip(names, predicted, strict=True):
                    share = reported.get(device)
                    weights = 0 if share is None else (share.weights or 0) + (share.repacked or 0)
                    if share is not None:
                        # of the mapped file, what was copied into another layout is not read again
                        weights -= share.droppable or 0
                    yield Comparison(
                        f"{header.path.stem}, {name}, {options.n_ctx} tokens, "
                        f"-ub {options.n_ubatch}, -fa {options.flash_attn}",
                        device,
                        memory,
                        layout.tied_bytes,
                        weights,
                        (share.kv or 0) if share else 0,
                        (share.compute or 0) + share.output if share else 0,
                    )


@contextmanager
def open_workers(count: int) -> Iterator[list[str]]:
    """Start workers on free ports, and yield their addresses."""
    with ExitStack() as stack:
        addresses = []
        for _ in range(count):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            process = stack.enter_context(
                subprocess.Popen(
                    [
                        *LLMCLI,
                        "worker",
                        "--rpc",
                        "--port",
                        str(port),
                        "-t",
                        "1",
                    ],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            found = next(match for line in process.stdout if (match := READY.search(line)))
            addresses.append(found[1])
        yield addresses


def main() -> int:
    """Compare all models, and print the faults and by how much buffers are overestimated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression of models")
    parser.add_argument("--workers", type=int, default=2, help="number of devices")
    parser.add_argument("--verbose", action="store_true", help="print every comparison")
    args = parser.parse_args()
    n_faults, ratios, extra = 0, [], []
    with tempfile.TemporaryDirectory() as folder, open_workers(args.workers) as addresses:
        rpc_workers.add_workers(tuple(addresses))
        devices = [
            (device.name, device.free_bytes) for device in offload_devices(list_devices(), 1.0)
        ]
        for model in MODELS:
            if not re.search(args.only, model.name):
                continue
            header = read_header(write_header(model, Path(folder) / f"{model.name}.gguf"))
            for each in compare(header, devices):
                if each.compute:
                    ratios.append(each.predicted.compute / each.compute)
                    extra.append(each.predicted.compute - each.compute)
                n_faults += bool(each.fault)
                if each.fault or args.verbose:
                    print(f"{each.what}, {each.device}: {each.fault or 'as reported'}", flush=True)
    if not ratios:
        raise SystemExit(f"no model matches {args.only!r}")
    print(
        f"{len(ratios)} comparisons, {n_faults} faults; buffers are overestimated by "
        f"{statistics.median(ratios):.2f} times (median; least {min(ratios):.2f}, most "
        f"{max(ratios):.2f}), at most {max(extra) >> 20} MiB"
    )
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
