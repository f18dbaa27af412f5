#!/usr/bin/env python3
"""Compare `llmcli quantize FOLDER` with llama.cpp's two steps, in time, memory and disk.

usage: .venv/bin/python scripts/benchmarks/quantize.py FOLDER --llama-quantize PATH
       [--convert SCRIPT] [--type Q4_K_M] [-t N] [--rounds 3] [--work FOLDER]
       .venv/bin/python scripts/benchmarks/quantize.py FOLDER --ours-only

The two steps are writing a BF16 GGUF file and running llama-quantize on it. The BF16 file is
written by llama.cpp's converter if --convert names its convert_hf_to_gguf.py, else by this project.
Both ways run in turn, in alternating order, and every run starts after a sync. The script prints
medians of wall time, CPU time, the largest resident memory of a process, and the largest disk use
besides the checkpoint and the finished file; then the number of tensors with equal bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parents[2]))
POLL = 0.02  # seconds between two reads of the disk usage


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run: wall and CPU seconds, peak resident memory of a process in bytes, and
    peak disk bytes beyond the finished file. `stdout` is the text that the command printed.
    """

    wall: float
    cpu: float
    resident: int
    disk: int
    stdout: str = ""


def main() -> None:
    """Parse the flags, measure both ways in turn and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--convert", type=Path)
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, help="folder for the files; default: a temporary folder"
    )
    args = parser.parse_args()
    if not args.ours_only and not args.llama_quantize:
        parser.error("pass llama.cpp's tool with --llama-quantize, or --ours-only")
    costs: dict[str, list[Cost]] = (
        {"one pass": []} if args.ours_only else {"one pass": [], "two steps": []}
    )
    with tempfile.TemporaryDirectory(dir=args.work) as temporary:
        ours, theirs = Path(temporary) / "ours.gguf", Path(temporary) / "theirs.gguf"
        for turn in range(args.rounds):
            for way in sorted(costs, reverse=bool(turn % 2)):
                out = ours if way == "one pass" else theirs
                out.unlink(missing_ok=True)
                costs[way].append(
                    one_pass(args, out) if way == "one pass" else two_steps(args, out)
                )
                print(f"  {way:10} {line(costs[way][-1])}", flush=True)
        report(costs)
        if not args.ours_only:
            compare_tensors(ours, theirs)


def one_pass(args: argparse.Namespace, out: Path) -> Cost:
    """Run `llmcli quantize`; print the share of the time in which its encoders were running."""
    words = [
        sys.executable,
        "-m",
        "llmcli.app",
        "quantize",
        args.folder,
        "--type",
        args.type,
        "-o",
        out,
        "--json",
    ]
    cost = run([*words, "--threads", args.threads], out)
    document = json.loads(cost.stdout)
    busy = (
        sum(row["elapsed_ms"] or 0 for row in document["types"].values()) / document["elapsed_ms"]
    )
    print(f"  {'':10} encoders busy {busy:.0%} of {document['elapsed_ms'] / 1000:.1f} s")
    return cost


def two_steps(args: argparse.Namespace, out: Path) -> Cost:
    """Write a BF16 file, run llama-quantize on it, and return the cost of both steps together."""
    middle = out.with_name("middle.gguf")
    if args.convert:
        first = run(
            [sys.executable, args.convert, args.folder, "--outtype", "bf16", "--outfile", middle],
            out,
        )
    else:
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "quantize",
            args.folder,
            "--type",
            "BF16",
            "-o",
            middle,
            "--json",
        ]
        first = run([*words, "--threads", args.threads], out)
    second = run([args.llama_quantize, middle, out, args.type, args.threads], out, sync=False)
    middle.unlink()
    print(f"  {'':10} BF16 file {first.wall:.1f} s, llama-quantize {second.wall:.1f} s")
    return Cost(
        first.wall + second.wall,
        first.cpu + second.cpu,
        max(first.resident, second.resident),
        max(first.disk, second.disk),
    )


def run(words: list[object], out: Path, *, sync: bool = True) -> Cost:
    """Run a command that writes `out`, and measure its cost. `disk` is the peak size of the folder
    minus the size of the finished `out`. `sync`: write pending data to disk first.
    """
    if sync:
        os.sync()
    others, peak, finished_event = (
        [file for file in out.parent.iterdir() if file.name == f"{other_stem(out)}.gguf"],
        [0],
        threading.Event(),
    )

    def poll_disk() -> None:
        while not finished_event.wait(POLL):
            peak[0] = max(peak[0], disk_bytes(out.parent, others))

    watcher = threading.Thread(target=poll_disk)
    watcher.start()
    began = time.monotonic()
    with tempfile.TemporaryFile() as stdout_file, tempfile.TemporaryFile() as stderr_file:
        child = subprocess.Popen(
            [str(word) for word in words], stdout=stdout_file, stderr=stderr_file, cwd=ROOT
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - began
        finished_event.set()
        watcher.join()
        stdout_file.seek(0)
        stderr_file.seek(0)
        if child.returncode:
            raise SystemExit(
                f"{words} failed: {stderr_file.read().decode(errors='replace')[-2000:]}"
            )
        text = stdout_file.read().decode(errors="replace")
    finished = disk_bytes(out.parent, others, only=out)
    return Cost(
        wall,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
        max(0, peak[0] - finished),
        text,
    )


def other_stem(out: Path) -> str:
    """Return the stem of the file that the other way writes: "ours" or "theirs"."""
    return "theirs" if out.stem == "ours" else "ours"


def disk_bytes(folder: Path, others: list[Path], only: Path | None = None) -> int:
    """Return the bytes of disk blocks that a folder's files occupy, without the files in `others`.
    With `only`, count only this file.
    """
    total = 0
    for file in folder.iterdir() if only is None else [only]:
        try:
            total += 0 if file in others else file.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # it was renamed or removed in the meantime
    return total


def line(cost: Cost) -> str:
    """Return the figures of a cost as text."""
    return (
        f"wall {cost.wall:7.1f} s   cpu {cost.cpu:7.1f} s   resident {cost.resident / 1e6:7.0f} MB"
        f"   extra disk {cost.disk / 1e6:7.0f} MB"
    )


def report(costs: dict[str, list[Cost]]) -> None:
    """Print the medians of each way, and the ratio of wall times of each round. Other load on the
    machine affects both ways of a round, so ratios within rounds are stable.
    """
    medians = {
        way: Cost(
            *(
                statistics.median(values)
                for values in zip(*((c.wall, c.cpu, c.resident, c.disk) for c in runs), strict=True)
            )
        )
        for way, runs in costs.items()
    }
    for way, cost in medians.items():
        print(f"{way:12} {line(cost)}   (median of {len(costs[way])})")
    if len(costs) == 2:
        pairs = list(zip(costs["one pass"], costs["two steps"], strict=True))
        walls = [first.wall / second.wall for first, second in pairs]
        cpu = statistics.median(first.cpu / second.cpu for first, second in pairs)
        print(
            f"wall {statistics.median(walls):.2f} of the two steps' (rounds: {', '.join(f'{x:.2f}' for x in walls)})",
            end="",
        )
        print(f", CPU time {cpu:.2f}")


def compare_tensors(ours: Path, theirs: Path) -> None:
    """Print the number of tensors with equal bytes; exit with 1 if one differs."""
    from scripts.reference.quantize import compare

    equal, total, differing = compare(ours, theirs)
    print(
        f"tensors of equal type and bytes: {equal} of {total}",
        *differing[:5],
        sep="\n    " if differing else "",
    )
    if differing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
