#!/usr/bin/env python3
"""Compare the planned memory of a run with the actual memory when the context is full.

usage: .venv/bin/python scripts/benchmarks/memory_plan.py [MODEL ...] [--contexts 512,2048,4096]
       [--types f16,q8_0,q4_0] [-t N]

MODEL is a name of the catalog or a GGUF (default: smollm2:135m and gemma3:270m; NAME@256,1024 gives
a model its own contexts). A case is a context size, a KV type, and one pool or one stream per
sequence, for two sequences. It is planned in one process and loaded in another, which fills every
cell with random tokens and then reads its memory. Goals: weights and KV differ by 0 bytes, compute
and output buffers by at most 1 %, the whole process by at most 3 %. The script exits with 1 if a
goal is missed.
"""

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli import config
from llmcli.hardware import host
from llmcli.model_loader.prepare import prepare_model
from llmcli.planning import memory_plan
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.ui import UI
from quant.model_file import load_checks, read_header

SEQUENCES = 2
PARTS = ("weights", "repacked", "kv", "compute", "output", "interpreter", "process")
GOALS = {
    "weights": 0.0,
    "repacked": 0.0,
    "kv": 0.0,
    "compute": 0.01,
    "output": 0.01,
    "process": 0.03,
}


@dataclass(frozen=True)
class Case:
    """One model with one context."""

    path: str
    options: ContextOptions

    def ask(self, what: str) -> dict[str, Any]:
        """Plan or load the model in another process."""
        words = [sys.executable, __file__, f"--{what}", self.path, json.dumps(asdict(self.options))]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{self}: {done.stderr[-2000:]}")
        return json.loads(done.stdout)

    def __str__(self) -> str:
        pool = "one pool" if self.options.unified else "streams"
        return f"{Path(self.path).stem[:28]:28} {self.options.n_ctx:>6} {self.options.type_k:>5} {pool:8}"


def planned(path: Path, options: ContextOptions) -> dict[str, Any]:
    """Return the planned bytes by part, without loading the model."""
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    with memory_plan.open_memory_planner(header, options, 0) as planner:
        told = planner.memory_plan()
    return {part: getattr(told.sums, part) for part in PARTS[:5]} | {
        "interpreter": told.overhead,
        "process": told.process_bytes,
    }


def loaded(path: Path, options: ContextOptions) -> dict[str, Any]:
    """Return the actual bytes by part with a full context; `file`: bytes of the mapped file in
    memory.
    """
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    opened = open_model(path, gpu_layers=0, latent=header.has_latent_attention)
    with opened as model, open_context(model, options) as context:
        fill(context)
        resident = host.resident_memory()
        held = context.memory_breakdown()
        assert held and resident, "llama.cpp or this machine does not report its memory"
        (share,) = memory_plan.device_memory(held, context.output_bytes, {}, None, None)
        parts: dict[str, Any] = {part: getattr(share, part) for part in PARTS[:5]}
        rest = resident - sum(parts.values())
        return parts | {"interpreter": rest, "process": resident, "file": mapped(path)}


def fill(context: Context) -> None:
    """Fill every cell with random tokens, one sequence after the other, with logits of each last
    row.
    """
    chance = random.Random(0)
    each = context.n_ctx // SEQUENCES
    for sequence in range(SEQUENCES):
        for start in range(0, each, context.n_batch):
            count = min(context.n_batch, each - start)
            tokens = [chance.randrange(context.n_vocab) for _ in range(count)]
            wants = [False] * (count - 1) + [True]
            context.decode(
                BatchRows(tokens, range(start, start + count), [sequence] * count, wants)
            )


def mapped(path: Path) -> int:
    """Return the bytes of the model's file in this process's memory."""
    nbytes, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(path.name)
        elif ours and line.startswith("Rss:"):
            nbytes += int(line.split()[1]) * 1024
    return nbytes


def cases(asked: argparse.Namespace) -> Iterator[Case]:
    """Yield every model in every context."""
    for word in asked.models:
        name, _, own = word.partition("@")
        path = prepare_model(name, None, config.load_config(), UI(color=False)).path
        sizes = [int(size) for size in (own or asked.contexts).split(",")]
        base = ContextOptions(
            0, n_seq_max=SEQUENCES, n_threads=asked.threads, n_threads_batch=asked.threads
        )
        for size, kind, unified in product(sizes, asked.types.split(","), (True, False)):
            yield Case(
                str(path), replace(base, n_ctx=size, type_k=kind, type_v=kind, unified=unified)
            )


def share(told: int, found: int) -> float:
    """Return the error of the plan relative to the actual bytes."""
    return abs(told - found) / found if found else float(told != found)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["smollm2:135m", "gemma3:270m"])
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("-t", "--threads", type=int, default=host.core_count())
    asked = parser.parse_args()
    worst: dict[str, tuple[float, int, str]] = {}
    print(
        f"{'model':28} {'cells':>6} {'KV':>5} {'':8} part: planned, actual, difference (of those that differ)"
    )
    every = list(cases(asked))
    for case in every:
        told, found = case.ask("plan"), case.ask("load")
        for part in PARTS:
            off = share(told[part], found[part])
            if part not in worst or off > worst[part][0]:
                worst[part] = (off, told[part] - found[part], str(case))
        apart = [part for part in PARTS if told[part] != found[part]]
        words = [
            f"{part}: {told[part]:,}, {found[part]:,}, {told[part] / found[part] - 1:+.2%}"
            for part in apart
        ]
        print(f"{case} {'; '.join(words)}; of the file {found['file']:,} in memory", flush=True)
    print(
        f"\n{len(every)} contexts of {SEQUENCES} sequences, every cell filled; the worst of each part:"
    )
    for part, (off, nbytes, where) in worst.items():
        goal = f" (goal {GOALS[part]:.0%})" if part in GOALS else ""
        print(f"  {part:12} {nbytes:>+12,} bytes {off:8.3%}{goal}  {where if nbytes else ''}")
    missed = [part for part, goal in GOALS.items() if worst[part][0] > goal]
    print("every goal is met" if not missed else f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["--plan"], ["--load"]):
        wanted = Path(sys.argv[2]), ContextOptions(**json.loads(sys.argv[3]))
        print(json.dumps((planned if sys.argv[1] == "--plan" else loaded)(*wanted)))
        sys.exit(0)
    sys.exit(main())
