#!/usr/bin/env python3
"""Compare the speeds that `llmcli bench` and llama.cpp's llama-bench report for the same tests.

usage: .venv/bin/python scripts/benchmarks/llama_bench.py MODEL [MODEL ...]
       --llama-bench [NAME=]PROGRAM … [--pairs 10] [--repetitions 2] [--threads 1,2]
       [--prompt 512] [--gen 128] [--depth 0] [--cache-type f16]
       .venv/bin/python scripts/benchmarks/llama_bench.py MODEL [MODEL ...] --inside [--seconds 40]
       [--threads 1,2] …

A turn is one process of each program, in alternating order. A process runs prompt tests (pp512) and
a generation test (tg128) with each number of threads, after a warm-up; the median of its
repetitions counts. For each test the script prints the median speeds, the median of the turns'
ratios with its 95% bootstrap interval, and whether this median reaches 0.98. Run it on an idle
machine.

--llama-bench may be repeated, to compare with several programs in one run. PROGRAM is a path,
optionally with options: ik="ik_llama.cpp/build/bin/llama-bench -rtr 1". --depth fills the KV cache
with so many tokens first. --cache-type is that of both K and V.

--inside compares both methods in one process (scripts/benchmarks/in_process.py) and spends
--seconds on each printed line. Contexts opened as by bench and as by llama-bench compute in turn
over the same weights. The script prints the ratio of the median speeds with its interval.
"""

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks import in_process
from scripts.benchmarks.paired_runs import LLMCLI, document, interval, model_path

GOAL = 0.98

Rates = dict[tuple[int, str], float]


def rates(command: list[str], model: str, args: argparse.Namespace) -> Rates:
    """Run one process of bench or llama-bench; return its median tokens per second by number of
    threads and test name, such as (2, "pp512").
    """
    flags = [
        "-p",
        args.prompt,
        "-n",
        str(args.gen),
        "-r",
        str(args.repetitions),
        "-t",
        args.threads,
    ]
    if args.depth:
        flags += ["-d", str(args.depth)]
    if args.cache_type:
        flags += ["-ctk", args.cache_type, "-ctv", args.cache_type, "-fa", "1"]
    rows = document([*command, "-m", model, *flags, "-o", "json"])
    return {
        (
            row["n_threads"],
            f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}",
        ): statistics.median(row["samples_ts"])
        for row in rows
    }


def name_programs(specifications: list[str]) -> dict[str, list[str]]:
    """Return the command of each program by its name, from the values of --llama-bench."""
    programs = {}
    for number, text in enumerate(specifications, start=1):
        name, separator, command = text.partition("=")
        if not separator or "/" in name:
            name, command = "llama-bench" if number == 1 else f"llama-bench {number}", text
        programs[name] = shlex.split(command)
    return programs


def turns(model: str, args: argparse.Namespace) -> dict[str, list[Rates]]:
    """Run all turns; return for each program one `Rates` per turn."""
    programs = {"bench": [*LLMCLI, "bench", "--no-history"], **name_programs(args.llama_bench)}
    rates_by_program: dict[str, list[Rates]] = {name: [] for name in programs}
    for number in range(args.pairs):
        for name in sorted(programs, reverse=bool(number % 2)):
            rates_by_program[name].append(rates(programs[name], model, args))
    return rates_by_program


def print_ratios(rates_by_program: dict[str, list[Rates]]) -> bool:
    """Print a line for each test and each other program; return whether the median ratio of every
    line reaches GOAL.
    """
    reached = True
    for threads, test in sorted(rates_by_program["bench"][0]):
        ours = [process_rates[threads, test] for process_rates in rates_by_program["bench"]]
        for name in rates_by_program:
            if name == "bench":
                continue
            theirs = [process_rates[threads, test] for process_rates in rates_by_program[name]]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            median, (low, high) = statistics.median(ratios), interval(ratios)
            reached &= median >= GOAL
            speeds = f"bench {statistics.median(ours):8.2f}  {name} {statistics.median(theirs):8.2f} tok/s"
            verdict = f"{'>=' if median >= GOAL else '<'} {GOAL}"
            span = f"95% interval {low:.4f} to {high:.4f}"
            print(
                f"  {test:6} -t {threads}: {speeds}  ratio {median:.4f}  {span}  {verdict}",
                flush=True,
            )
    return reached


def compare_in_process(model: Path, args: argparse.Namespace) -> bool:
    """Measure one model in this process and print a line for each test; return whether the ratio of
    every test reaches GOAL.
    """
    reached = True
    threads = [int(count) for count in args.threads.split(",")]
    for test, paired in in_process.measure(
        model, threads, int(args.prompt), args.gen, args.seconds
    ):
        (ratio, low, high), (ours, theirs) = paired.ratio(), paired.speeds()
        reached &= ratio >= GOAL
        print(
            f"  {test.name:6} -t {test.n_threads}: bench {ours:8.2f}  llama-bench's way {theirs:8.2f} tok/s  "
            f"ratio {ratio:.4f}  95% interval {low:.4f} to {high:.4f}, {len(paired.ours)} turns  "
            f"{'>=' if ratio >= GOAL else '<'} {GOAL}",
            flush=True,
        )
    return reached


def main() -> None:
    """Parse the flags, measure and print; exit with 1 if a ratio misses GOAL."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--llama-bench",
        action="append",
        metavar="[NAME=]PROGRAM",
        help="llama.cpp's tool, or that of a fork; repeatable",
    )
    way.add_argument("--inside", action="store_true", help="measure both in this process")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=40, help="per line, with --inside")
    parser.add_argument("--repetitions", type=int, default=2, help="per test and process")
    parser.add_argument("-t", "--threads", default="1,2")
    parser.add_argument("--prompt", default="512", help="one length or several, with commas")
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--depth", type=int, default=0, help="tokens in the KV cache")
    parser.add_argument("--cache-type", help="of K and V, with flash attention")
    args = parser.parse_args()
    good = True
    for ref in args.models:
        model, began = model_path(ref), time.monotonic()
        if args.inside:
            print(f"{Path(model).name}:", flush=True)
            good &= compare_in_process(Path(model), args)
            continue
        rates_by_program = turns(model, args)
        settings = f" at depth {args.depth}" * bool(args.depth)
        settings += f", {args.cache_type} cache" if args.cache_type else ""
        seconds = time.monotonic() - began
        print(f"{Path(model).name}{settings}: {args.pairs} pairs, {seconds:.0f} s", flush=True)
        good &= print_ratios(rates_by_program)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
