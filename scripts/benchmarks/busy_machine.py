#!/usr/bin/env python3
"""Measure how fast tokens are generated while other programs use the processor.

usage: .venv/bin/python scripts/benchmarks/busy_machine.py FILE.gguf ... [--loops 0,1,2]
       [--threads 2] [--seconds 8] [--rounds 3]

Busy loops run beside a process that generates tokens, in three ways in turn: as llmcli does, which
adapts the number of threads (runtime/engine/thread_team.py); with a fixed number; and with a fixed
number and OpenMP's limit of spinning instead of llmcli's (config.limit_spinning). For each file and
number of loops the script prints the tokens per second (medians of the rounds), and our speed in
units of a fair share: the speed without loops, times the part of the cores that the threads would
get if every thread and loop got the same.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.engine.thread_team import ThreadTeam

OPENMP_SPINS = "300000"  # GCC's default without OMP_WAIT_POLICY
CELLS = 2048


def main() -> None:
    """Parse the flags and measure; with --child, generate tokens and print their number a second."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--loops", default="0,1,2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fixed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(generate(args.files[0], args.threads, args.seconds, args.fixed))
        return
    print("file                 loops   tokens/s ours   fixed   OpenMP's spins   of a fair share")
    for path in args.files:
        alone = 0.0
        for loops in (int(word) for word in args.loops.split(",")):
            own, fixed, theirs = measure(path, loops, args)
            alone = alone or own
            cores = len(os.sched_getaffinity(0))
            share = min(1.0, cores / (args.threads + loops)) / min(1.0, cores / args.threads)
            print(
                f"{path.stem[:20]:20} {loops:5} {own:15.1f} {fixed:7.1f} {theirs:16.1f} "
                f"{own / alone / share:15.2f}",
                flush=True,
            )


def measure(path: Path, loops: int, args: argparse.Namespace) -> list[float]:
    """Return the tokens per second beside `loops` busy loops, in the three ways."""
    command = [sys.executable, __file__, str(path), "--child"]
    command += ["--threads", str(args.threads), "--seconds", str(args.seconds)]
    spins = {"GOMP_SPINCOUNT": OPENMP_SPINS}
    ways: list[tuple[list[str], dict[str, str]]] = [
        ([], {}),
        (["--fixed"], {}),
        (["--fixed"], spins),
    ]
    speeds: list[list[float]] = [[] for _ in ways]
    with busy_loops(loops):
        for _ in range(args.rounds):
            for samples, (flags, environment) in zip(speeds, ways, strict=True):
                done = subprocess.run(
                    [*command, *flags],
                    env=os.environ | environment,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                samples.append(float(done.stdout))
    return [statistics.median(samples) for samples in speeds]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run processes that use a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def generate(path: Path, threads: int, seconds: float, is_fixed: bool) -> float:
    """Generate tokens for some seconds, and return their number a second."""
    options = ContextOptions(CELLS, n_threads=threads, n_threads_batch=threads)
    with open_model(path, ON_HOST) as model, open_context(model, options) as context:
        context.decode(BatchRows([1, 2, 3, 4], range(4), [0] * 4, [False] * 3 + [True]))
        team = ThreadTeam(
            1 if is_fixed else threads, lambda number: context.set_threads(number, threads)
        )
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds and count < CELLS - 8:
            start_time = time.perf_counter()
            context.decode(BatchRows([5 + count % 100], [4 + count], [0], [True]))
            team.observe_pass(1, time.perf_counter() - start_time)
            count += 1
        return count / passed


if __name__ == "__main__":
    main()
