#!/usr/bin/env python3
"""Compare `llmcli run`, `llmcli bench` and llama.cpp's llama-bench in one run.

usage: .venv/bin/python scripts/benchmarks/speed.py [MODEL.gguf] [--llama-bench PATH] [--pairs 15]
       [--repetitions 1] [--tokens 256] [--threads N]

Each round runs every program once in its own process, in an order that changes from round to round.
The script prints medians, and for each pair the median ratio with a 95% bootstrap interval: drift
of the machine affects both sides of a pair, so ratios are stable where seconds are not. Run it on
an idle machine, with many short pairs (--pairs 100 --tokens 64) if processes of one program differ
by several percent.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.paired_runs import LLMCLI, document, interval, model_path


def run_speed(model: str, tokens: int, threads: int) -> float:
    """Return the tokens per second of `llmcli run --json`, with sampler, detokenizer and token
    times.
    """
    answer = document(
        [
            *LLMCLI,
            "run",
            model,
            "-p",
            "Once upon a time",
            "--raw",
            "--temp",
            "0",
            "--ignore-eos",
            "-n",
            str(tokens),
            "-c",
            "512",
            "-t",
            str(threads),
            "--json",
        ]
    )
    assert len(answer["tokens"]) == tokens, len(answer["tokens"])
    return answer["timing"]["tokens_per_second"]


def bench_speed(
    command: list[str], model: str, tokens: int, threads: int, repetitions: int
) -> float:
    """Return the tokens per second of a tg test: the median of its repetitions after the warm-up."""
    flags = ["-p", "0", "-n", str(tokens), "-r", str(repetitions), "-t", str(threads), "-o", "json"]
    return statistics.median(document([*command, "-m", model, *flags])[0]["samples_ts"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--llama-bench", help="llama.cpp's tool, built from the same source")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--repetitions", type=int, default=1, help="of the bench tests, per process"
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    model = model_path(options.model)
    bench = [*LLMCLI, "bench", "--no-history"]
    sides = {
        "run": lambda: run_speed(model, options.tokens, options.threads),
        "bench": lambda: bench_speed(
            bench, model, options.tokens, options.threads, options.repetitions
        ),
    }
    if options.llama_bench:
        sides["llama-bench"] = lambda: bench_speed(
            [options.llama_bench], model, options.tokens, options.threads, options.repetitions
        )
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(options.pairs):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(sides[name]())
        print(
            f"round {number + 1:2}: "
            + "  ".join(f"{name} {found[name][-1]:.1f}" for name in names),
            flush=True,
        )
    for name, values in found.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(
            f"{name:12} median {statistics.median(values):7.2f} tok/s  ({spread}, {len(values)} runs)"
        )
    for one, other in (("run", "bench"), ("bench", "llama-bench")):
        if other in found:
            ratios = [a / b for a, b in zip(found[one], found[other], strict=True)]
            low, high = interval(ratios)
            print(
                f"{one} / {other}: median {statistics.median(ratios):.4f}  95% interval {low:.4f} to {high:.4f}"
            )


if __name__ == "__main__":
    main()
