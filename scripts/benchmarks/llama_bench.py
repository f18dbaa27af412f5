#!/usr/bin/env python3
"""Compare `llmcli bench` with llama.cpp's llama-bench: the same tests and flags in turn.

usage: .venv/bin/python scripts/benchmarks/llama_bench.py MODEL [MODEL ...] --llama-bench PATH
       [--pairs 10] [--repetitions 2] [--threads 1,2] [--prompt 512] [--gen 128]
       .venv/bin/python scripts/benchmarks/llama_bench.py MODEL [MODEL ...] --inside [--seconds 40]
       [--threads 1,2] …

A pair is one process of each program, in alternating order. A process runs pp512 and tg128 with
each number of threads, after llama-bench's warm-up, and the median of its repetitions counts. The
script prints medians over the pairs, the median of the ratios with a 95% bootstrap interval, and
whether it reaches 0.98. Run it on an idle machine.

--inside compares both in one process (scripts/benchmarks/in_process.py), each line for --seconds:
contexts as bench opens them and as llama-bench does, in turn over the same weights. It prints the
ratio of medians over the turns with its interval.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks import in_process
from scripts.benchmarks.paired_runs import LLMCLI, document, interval, model_path

GOAL = 0.98

Rates = dict[tuple[int, str], float]


def rates(command: list[str], model: str, asked: argparse.Namespace) -> Rates:
    """Return the tokens per second of one process by threads and test."""
    flags = [
        "-p",
        str(asked.prompt),
        "-n",
        str(asked.gen),
        "-r",
        str(asked.repetitions),
        "-t",
        asked.threads,
    ]
    rows = document([*command, "-m", model, *flags, "-o", "json"])
    return {
        (
            row["n_threads"],
            f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}",
        ): statistics.median(row["samples_ts"])
        for row in rows
    }


def pairs(model: str, asked: argparse.Namespace) -> dict[str, list[Rates]]:
    """Return the speeds of both programs for every pair."""
    sides = {"bench": [*LLMCLI, "bench", "--no-history"], "llama-bench": [asked.llama_bench]}
    found: dict[str, list[Rates]] = {name: [] for name in sides}
    for number in range(asked.pairs):
        for name in sorted(sides, reverse=bool(number % 2)):
            found[name].append(rates(sides[name], model, asked))
    return found


def tell(found: dict[str, list[Rates]]) -> bool:
    """Print a line for each test; return whether all reach the goal."""
    good = True
    for threads, test in sorted(found["bench"][0]):
        ours, theirs = (
            [one[threads, test] for one in found[name]] for name in ("bench", "llama-bench")
        )
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        middle, (low, high) = statistics.median(ratios), interval(ratios)
        good &= middle >= GOAL
        speeds = f"bench {statistics.median(ours):8.2f}  llama-bench {statistics.median(theirs):8.2f} tok/s"
        verdict = f"{'>=' if middle >= GOAL else '<'} {GOAL}"
        span = f"95% interval {low:.4f} to {high:.4f}"
        print(
            f"  {test:6} -t {threads}: {speeds}  ratio {middle:.4f}  {span}  {verdict}", flush=True
        )
    return good


def within(model: Path, asked: argparse.Namespace) -> bool:
    """Measure both in this process, a line for each test; return whether all reach the goal."""
    good = True
    threads = [int(count) for count in asked.threads.split(",")]
    for test, paired in in_process.measure(model, threads, asked.prompt, asked.gen, asked.seconds):
        (ratio, low, high), (ours, theirs) = paired.ratio(), paired.speeds()
        good &= ratio >= GOAL
        print(
            f"  {test.name:6} -t {test.n_threads}: bench {ours:8.2f}  llama-bench's way {theirs:8.2f} tok/s  "
            f"ratio {ratio:.4f}  95% interval {low:.4f} to {high:.4f}, {len(paired.ours)} turns  "
            f"{'>=' if ratio >= GOAL else '<'} {GOAL}",
            flush=True,
        )
    return good


def main() -> None:
    """Measure and print; exit with 1 if a median misses the goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--llama-bench", help="llama.cpp's tool, built from the same source")
    way.add_argument("--inside", action="store_true", help="measure both in this process")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=40, help="per line, with --inside")
    parser.add_argument("--repetitions", type=int, default=2, help="per test and process")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=128)
    asked = parser.parse_args()
    good = True
    for ref in asked.models:
        model, began = model_path(ref), time.monotonic()
        if asked.inside:
            print(f"{Path(model).name}:", flush=True)
            good &= within(Path(model), asked)
            continue
        found = pairs(model, asked)
        print(
            f"{Path(model).name}: {asked.pairs} pairs, {time.monotonic() - began:.0f} s", flush=True
        )
        good &= tell(found)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
