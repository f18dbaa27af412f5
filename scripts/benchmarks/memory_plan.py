#!/usr/bin/env python3
"""Compare the memory that `llmcli plan` predicts with the actual memory when the context is full.

usage: .venv/bin/python scripts/benchmarks/memory_plan.py [MODEL ...] [--contexts 512,2048,4096]
       [--types f16,q8_0,q4_0] [-t N]

MODEL is a name of the catalog or a GGUF file (default: smollm2:135m and gemma3:270m).
NAME@256,1024 measures a model with these context sizes instead of --contexts. Each model is
measured with every context size, every KV type, and one KV pool or one KV stream per sequence, for
two sequences. One process plans the memory. Another loads the model, fills every KV cell with
random tokens and then reads its memory. Goals: weights and KV differ by 0 bytes, compute and output
buffers by at most 1 %, the whole process by at most 3 %. The script exits with 1 if a goal is
missed.
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
from llmcli.planning.dry_runs import memory_plan
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
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
    """A model file and the options of the context that is planned and measured."""

    path: str
    options: ContextOptions

    def ask(self, what: str) -> dict[str, Any]:
        """Plan (`what` is "plan") or load (`what` is "load") the model in another process. Return
        the bytes of every part; exit with the error message of that process if it fails.
        """
        words = [sys.executable, __file__, f"--{what}", self.path, json.dumps(asdict(self.options))]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{self}: {done.stderr[-2000:]}")
        return json.loads(done.stdout)

    def __str__(self) -> str:
        pool = "one pool" if self.options.unified else "streams"
        return f"{Path(self.path).stem[:28]:28} {self.options.n_ctx:>6} {self.options.type_k:>5} {pool:8}"


def plan_bytes(path: Path, options: ContextOptions) -> dict[str, Any]:
    """Return the planned bytes of every entry of PARTS, without loading the model."""
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    with memory_plan.open_memory_planner(header, options, ON_HOST) as planner:
        plan = planner.memory_plan()
    return {part: getattr(plan.sums, part) for part in PARTS[:5]} | {
        "interpreter": plan.overhead,
        "process": plan.process_bytes,
    }


def measure_bytes(path: Path, options: ContextOptions) -> dict[str, Any]:
    """Load the model, fill the context, and return the actual bytes of every entry of PARTS. "file"
    has the bytes of the memory-mapped model file that are in memory.
    """
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    opened = open_model(path, ON_HOST.for_header(header))
    with opened as model, open_context(model, options) as context:
        fill_cache(context)
        resident = host.resident_memory()
        breakdown = context.memory_breakdown()
        assert breakdown and resident, "llama.cpp or this machine does not report its memory"
        (usage,) = memory_plan.device_memory(breakdown, context.output_bytes, {}, None, None)
        parts: dict[str, Any] = {part: getattr(usage, part) for part in PARTS[:5]}
        interpreter = resident - sum(parts.values())
        return parts | {"interpreter": interpreter, "process": resident, "file": mapped_bytes(path)}


def fill_cache(context: Context) -> None:
    """Fill the cells of every sequence with random tokens. The last row of each batch has logits,
    so that llama.cpp needs its output buffers.
    """
    rng = random.Random(0)
    cells_per_sequence = context.n_ctx // SEQUENCES
    for sequence in range(SEQUENCES):
        for start in range(0, cells_per_sequence, context.n_batch):
            count = min(context.n_batch, cells_per_sequence - start)
            tokens = [rng.randrange(context.n_vocab) for _ in range(count)]
            with_logits = [False] * (count - 1) + [True]
            context.decode(
                BatchRows(tokens, range(start, start + count), [sequence] * count, with_logits)
            )


def mapped_bytes(path: Path) -> int:
    """Return the resident bytes of the memory-mapped model file in this process, from
    /proc/self/smaps.
    """
    nbytes, in_model_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            in_model_file = line.endswith(path.name)
        elif in_model_file and line.startswith("Rss:"):
            nbytes += int(line.split()[1]) * 1024
    return nbytes


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield every model of the command line with every context."""
    for argument in args.models:
        name, _, own_contexts = argument.partition("@")
        path = prepare_model(name, None, config.load_config(), UI(color=False)).path
        sizes = [int(size) for size in (own_contexts or args.contexts).split(",")]
        base = ContextOptions(
            0, n_seq_max=SEQUENCES, n_threads=args.threads, n_threads_batch=args.threads
        )
        for size, kind, unified in product(sizes, args.types.split(","), (True, False)):
            yield Case(
                str(path), replace(base, n_ctx=size, type_k=kind, type_v=kind, unified=unified)
            )


def relative_error(planned: int, actual_bytes: int) -> float:
    """Return the plan's error as a share of the actual bytes: |planned - actual| / actual. If the
    actual size is 0, the error is 0 or 1.
    """
    return (
        abs(planned - actual_bytes) / actual_bytes
        if actual_bytes
        else float(planned != actual_bytes)
    )


def main() -> int:
    """Parse the flags, plan and measure every case, and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["smollm2:135m", "gemma3:270m"])
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("-t", "--threads", type=int, default=host.core_count())
    args = parser.parse_args()
    worst: dict[str, tuple[float, int, str]] = {}
    print(
        f"{'model':28} {'cells':>6} {'KV':>5} {'':8} part: planned, actual, difference (of those that differ)"
    )
    all_cases = list(cases(args))
    for case in all_cases:
        planned, actual = case.ask("plan"), case.ask("load")
        for part in PARTS:
            error = relative_error(planned[part], actual[part])
            if part not in worst or error > worst[part][0]:
                worst[part] = (error, planned[part] - actual[part], str(case))
        differing = [part for part in PARTS if planned[part] != actual[part]]
        differences = [
            f"{part}: {planned[part]:,}, {actual[part]:,}, {planned[part] / actual[part] - 1:+.2%}"
            for part in differing
        ]
        print(
            f"{case} {'; '.join(differences)}; of the file {actual['file']:,} in memory", flush=True
        )
    print(
        f"\n{len(all_cases)} contexts of {SEQUENCES} sequences, every cell filled; the worst of each part:"
    )
    for part, (error, nbytes, case_text) in worst.items():
        goal = f" (goal {GOALS[part]:.0%})" if part in GOALS else ""
        print(f"  {part:12} {nbytes:>+12,} bytes {error:8.3%}{goal}  {case_text if nbytes else ''}")
    missed = [part for part, goal in GOALS.items() if worst[part][0] > goal]
    print("every goal is met" if not missed else f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["--plan"], ["--load"]):
        wanted = Path(sys.argv[2]), ContextOptions(**json.loads(sys.argv[3]))
        print(json.dumps((plan_bytes if sys.argv[1] == "--plan" else measure_bytes)(*wanted)))
        sys.exit(0)
    sys.exit(main())
