#!/usr/bin/env python3
"""Measure the time from starting `llmcli run` to its first token, beside llama.cpp's
llama-completion.

usage: .venv/bin/python scripts/benchmarks/first_token.py MODEL [MODEL ...]
       --llama-completion PATH [--pairs 7] [--threads 2]

Both programs get the same short prompt, in alternating order, and the files are in the disk cache.
Python may keep its compiled modules, as it does for an installed package. The script prints the
median seconds until each writes the first byte of its answer, and the median difference (ours less
theirs) with the lowest and the highest.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.paired_runs import LLMCLI, model_path

PROMPT = "The capital of France is"


def main() -> None:
    """Measure every model and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--llama-completion", required=True, type=Path, dest="program")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("-t", "--threads", default="2")
    args = parser.parse_args()
    for model in map(model_path, args.models):
        flags = ["-n", "2", "-t", args.threads, "-c", "4096"]
        ours = [*LLMCLI, "run", model, PROMPT, "--raw", *flags]
        theirs = [str(args.program), "-m", model, "-p", PROMPT, *flags]
        theirs += ["-no-cnv", "--no-display-prompt", "--no-warmup"]
        seconds: tuple[list[float], list[float]] = [], []
        sides = [(ours, 0), (theirs, 1)]
        for number in range(args.pairs + 1):
            for command, side in sides:
                took = until_first_byte(command)
                if number:  # the first pair fills the disk cache
                    seconds[side].append(took)
            sides.reverse()
        differences = [one - other for one, other in zip(*seconds, strict=True)]
        print(
            f"{Path(model).name}: run {statistics.median(seconds[0]):.3f} s, llama-completion "
            f"{statistics.median(seconds[1]):.3f} s, difference {statistics.median(differences):+.3f} s "
            f"({min(differences):+.3f} to {max(differences):+.3f})",
            flush=True,
        )


def until_first_byte(command: list[str]) -> float:
    """Run a program, and return the seconds until it writes to stdout."""
    start_time = time.perf_counter()
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    ) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - start_time
        process.stdout.read()
    if not first:
        raise SystemExit(f"{' '.join(command)}: no output, status {process.returncode}")
    return seconds


if __name__ == "__main__":
    main()
