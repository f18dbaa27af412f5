#!/usr/bin/env python3
"""Measure how fast tokens are generated while other programs use the processor.

usage: .venv/bin/python scripts/benchmarks/busy_machine.py FILE.gguf ... [--loops 0,1,2]
       [--threads 2] [--seconds 8] [--rounds 3]

Busy loops run beside a process that generates tokens, with llmcli's limit of spinning
(config.limit_spinning) and with that of GCC's OpenMP, in turn. For each file and number of loops
the script prints the tokens per second of both (medians of the rounds), and our speed in units of a
fair share: the speed without loops, times the part of the cores that the threads would get if every
thread and loop got the same.
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
    args = parser.parse_args()
    if args.child:
        print(generate(args.files[0], args.threads, args.seconds))
        return
    print("file                 loops   tokens/s ours   OpenMP's spins   of a fair share")
    for path in args.files:
        alone = 0.0
        for loops in (int(word) for word in args.loops.split(",")):
            own, theirs = measure(path, loops, args)
            alone = alone or own
            cores = len(os.sched_getaffinity(0))
            share = min(1.0, cores / (args.threads + loops)) / min(1.0, cores / args.threads)
            print(
                f"{path.stem[:20]:20} {loops:5} {own:15.1f} {theirs:16.1f} {own / alone / share:15.2f}",
                flush=True,
            )


def measure(path: Path, loops: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return the tokens per second beside `loops` busy loops, with our limit of spinning and with
    that of OpenMP.
    """
    command = [sys.executable, __file__, str(path), "--child"]
    command += ["--threads", str(args.threads), "--seconds", str(args.seconds)]
    speeds: tuple[list[float], list[float]] = [], []
    with busy_loops(loops):
        for _ in range(args.rounds):
            for index, spins in enumerate(({}, {"GOMP_SPINCOUNT": OPENMP_SPINS})):
                environment = os.environ | spins
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                )
                speeds[index].append(float(done.stdout))
    return statistics.median(speeds[0]), statistics.median(speeds[1])


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


def generate(path: Path, threads: int, seconds: float) -> float:
    """Generate tokens for some seconds, and return their number a second."""
    options = ContextOptions(CELLS, n_threads=threads, n_threads_batch=threads)
    with open_model(path, ON_HOST) as model, open_context(model, options) as context:
        context.decode(BatchRows([1, 2, 3, 4], range(4), [0] * 4, [False] * 3 + [True]))
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds and count < CELLS - 8:
            context.decode(BatchRows([5 + count % 100], [4 + count], [0], [True]))
            count += 1
        return count / passed


if __name__ == "__main__":
    main()
