#!/usr/bin/env python3
"""Compare the generation speeds of `llmcli run`, `llmcli bench` and llama.cpp's llama-bench.

usage: .venv/bin/python scripts/benchmarks/speed.py [MODEL.gguf] [--llama-bench PATH] [--pairs 15]
       [--repetitions 1] [--tokens 256] [--threads N]

Each round runs every program once in its own process, in an order that changes from round to round.
The script prints the median speeds. For the pairs run / bench and bench / llama-bench it prints the
median ratio with a 95% bootstrap interval. Drift of the machine affects both programs of a round,
so ratios are more stable than seconds. Run it on an idle machine. Use many short rounds (--pairs
100 --tokens 64) if processes of one program differ by several percent.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.paired_runs import LLMCLI, document, interval, model_path


def run_speed(model: str, tokens: int, threads: int) -> float:
    """Return the tokens per second of `llmcli run --json`. They include sampler, detokenizer and
    token times.
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
    """Return the median tokens per second of a generation test (tg) of `command`, which is `llmcli
    bench` or llama-bench.
    """
    flags = ["-p", "0", "-n", str(tokens), "-r", str(repetitions), "-t", str(threads), "-o", "json"]
    return statistics.median(document([*command, "-m", model, *flags])[0]["samples_ts"])


def main() -> None:
    """Parse the flags, measure and print."""
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
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    model = model_path(args.model)
    bench = [*LLMCLI, "bench", "--no-history"]
    programs = {
        "run": lambda: run_speed(model, args.tokens, args.threads),
        "bench": lambda: bench_speed(bench, model, args.tokens, args.threads, args.repetitions),
    }
    if args.llama_bench:
        programs["llama-bench"] = lambda: bench_speed(
            [args.llama_bench], model, args.tokens, args.threads, args.repetitions
        )
    speeds: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for number in range(args.pairs):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            speeds[name].append(programs[name]())
        print(
            f"round {number + 1:2}: "
            + "  ".join(f"{name} {speeds[name][-1]:.1f}" for name in names),
            flush=True,
        )
    for name, values in speeds.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(
            f"{name:12} median {statistics.median(values):7.2f} tok/s  ({spread}, {len(values)} runs)"
        )
    for first, second in (("run", "bench"), ("bench", "llama-bench")):
        if second in speeds:
            ratios = [a / b for a, b in zip(speeds[first], speeds[second], strict=True)]
            low, high = interval(ratios)
            print(
                f"{first} / {second}: median {statistics.median(ratios):.4f}  95% interval {low:.4f} to {high:.4f}"
            )


if __name__ == "__main__":
    main()
