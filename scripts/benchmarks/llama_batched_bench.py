#!/usr/bin/env python3
"""Compare how fast `llmcli bench -np` and llama.cpp's llama-batched-bench generate several answers at
once.

usage: .venv/bin/python scripts/benchmarks/llama_batched_bench.py MODEL [MODEL ...]
       --llama-batched-bench PATH [--pairs 3] [--threads 2] [--parallel 4,8,16] [--gen 32]

A pair is one process of each program, in alternating order. Each generates --gen tokens of every
answer, from an empty cache (llama-batched-bench reads one token of prompt first). The script prints
the median speeds of all answers together, and the median of the pairs' ratios with its 95%
bootstrap interval.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.paired_runs import LLMCLI, document, interval, model_path

Rates = dict[int, float]  # tokens per second by number of answers


def main() -> None:
    """Measure every model and print its lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--llama-batched-bench", required=True, type=Path, dest="program")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("-t", "--threads", default="2")
    parser.add_argument("--parallel", default="4,8,16")
    parser.add_argument("--gen", default="32")
    args = parser.parse_args()
    for model in map(model_path, args.models):
        print(f"{Path(model).name}: {args.pairs} pairs", flush=True)
        sides = (own_rates, their_rates)
        runs: dict[str, list[Rates]] = {side.__name__: [] for side in sides}
        for number in range(args.pairs):
            for side in sides if number % 2 else reversed(sides):
                runs[side.__name__].append(side(model, args))
        for answers in sorted(runs["own_rates"][0]):
            ours, theirs = ([rates[answers] for rates in each] for each in runs.values())
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            low, high = interval(ratios)
            print(
                f"  {answers:3} answers: bench {statistics.median(ours):8.2f}  llama-batched-bench "
                f"{statistics.median(theirs):8.2f} tok/s  ratio {statistics.median(ratios):.3f}  "
                f"95% interval {low:.3f} to {high:.3f}",
                flush=True,
            )


def own_rates(model: str, args: argparse.Namespace) -> Rates:
    """Run one process of bench."""
    flags = ["-p", "0", "-n", args.gen, "-np", args.parallel, "-t", args.threads, "-r", "2"]
    rows = document([*LLMCLI, "bench", "--no-history", "-m", model, *flags, "-o", "json"])
    return {row["n_parallel"]: statistics.median(row["samples_ts"]) for row in rows}


def their_rates(model: str, args: argparse.Namespace) -> Rates:
    """Run one process of llama-batched-bench."""
    flags = ["-c", "4096", "-npp", "1", "-ntg", args.gen, "-npl", args.parallel]
    flags += ["-t", args.threads, "-tb", args.threads, "--output-format", "jsonl"]
    command = [str(args.program), "-m", model, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["pl"]: row["speed_tg"] for row in rows}


if __name__ == "__main__":
    main()
