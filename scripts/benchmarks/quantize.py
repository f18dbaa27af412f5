#!/usr/bin/env python3
"""Compare time, memory and disk of `llmcli quantize FOLDER` with a BF16 GGUF and llama-quantize.

usage: .venv/bin/python scripts/benchmarks/quantize.py FOLDER --llama-quantize PATH
       [--convert SCRIPT] [-t Q4_K_M] [--threads N] [--rounds 3] [--work FOLDER]
       .venv/bin/python scripts/benchmarks/quantize.py FOLDER --ours-only

The BF16 file is written by llama.cpp's converter if --convert names its convert_hf_to_gguf.py, else
by this project. Both ways run in turn, in alternating order; every run starts after a sync. The
script prints medians of wall time, CPU time, the largest resident memory of a process, and disk
beyond the finished file; then the number of tensors with equal bytes. The checkpoint itself is not
counted.
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
    """The cost of one way: seconds, CPU seconds, and peaks in bytes."""

    wall: float
    cpu: float
    resident: int
    disk: int
    said: str = ""


def main() -> None:
    """Measure both ways in turn and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--convert", type=Path)
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("-t", "--type", default="Q4_K_M")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, help="folder for the files; default: a temporary folder"
    )
    asked = parser.parse_args()
    if not asked.ours_only and not asked.llama_quantize:
        parser.error("pass llama.cpp's tool with --llama-quantize, or --ours-only")
    costs: dict[str, list[Cost]] = (
        {"one pass": []} if asked.ours_only else {"one pass": [], "two steps": []}
    )
    with tempfile.TemporaryDirectory(dir=asked.work) as place:
        ours, theirs = Path(place) / "ours.gguf", Path(place) / "theirs.gguf"
        for turn in range(asked.rounds):
            for way in sorted(costs, reverse=bool(turn % 2)):
                out = ours if way == "one pass" else theirs
                out.unlink(missing_ok=True)
                costs[way].append(
                    one_pass(asked, out) if way == "one pass" else two_steps(asked, out)
                )
                print(f"  {way:10} {line(costs[way][-1])}", flush=True)
        report(costs)
        if not asked.ours_only:
            same(ours, theirs)


def one_pass(asked: argparse.Namespace, out: Path) -> Cost:
    """Run `llmcli quantize`; print the share of time in which the encoders run."""
    words = [
        sys.executable,
        "-m",
        "llmcli.app",
        "quantize",
        asked.folder,
        "-t",
        asked.type,
        "-o",
        out,
        "--json",
    ]
    cost = run([*words, "--threads", asked.threads], out)
    document = json.loads(cost.said)
    busy = (
        sum(row["elapsed_ms"] or 0 for row in document["types"].values()) / document["elapsed_ms"]
    )
    print(f"  {'':10} encoders busy {busy:.0%} of {document['elapsed_ms'] / 1000:.1f} s")
    return cost


def two_steps(asked: argparse.Namespace, out: Path) -> Cost:
    """Write a BF16 file and run llama-quantize on it."""
    middle = out.with_name("middle.gguf")
    if asked.convert:
        first = run(
            [sys.executable, asked.convert, asked.folder, "--outtype", "bf16", "--outfile", middle],
            out,
        )
    else:
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "quantize",
            asked.folder,
            "-t",
            "BF16",
            "-o",
            middle,
            "--json",
        ]
        first = run([*words, "--threads", asked.threads], out)
    second = run([asked.llama_quantize, middle, out, asked.type, asked.threads], out, sync=False)
    middle.unlink()
    print(f"  {'':10} BF16 file {first.wall:.1f} s, llama-quantize {second.wall:.1f} s")
    return Cost(
        first.wall + second.wall,
        first.cpu + second.cpu,
        max(first.resident, second.resident),
        max(first.disk, second.disk),
    )


def run(words: list[object], out: Path, *, sync: bool = True) -> Cost:
    """Run a command; `disk` is the most its folder contained beyond the finished `out`."""
    if sync:
        os.sync()
    others, most, over = (
        [file for file in out.parent.iterdir() if file.name == f"{other(out)}.gguf"],
        [0],
        threading.Event(),
    )

    def look() -> None:
        while not over.wait(POLL):
            most[0] = max(most[0], held(out.parent, others))

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.monotonic()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        child = subprocess.Popen([str(word) for word in words], stdout=said, stderr=told, cwd=ROOT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - began
        over.set()
        watcher.join()
        said.seek(0)
        told.seek(0)
        if child.returncode:
            raise SystemExit(f"{words} failed: {told.read().decode(errors='replace')[-2000:]}")
        text = said.read().decode(errors="replace")
    finished = held(out.parent, others, only=out)
    return Cost(
        wall,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
        max(0, most[0] - finished),
        text,
    )


def other(out: Path) -> str:
    """Return the stem of the other way's finished file."""
    return "theirs" if out.stem == "ours" else "ours"


def held(folder: Path, others: list[Path], only: Path | None = None) -> int:
    """Return the disk bytes of a folder's files, or of one of them."""
    total = 0
    for file in folder.iterdir() if only is None else [only]:
        try:
            total += 0 if file in others else file.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # it was renamed or removed in the meantime
    return total


def line(cost: Cost) -> str:
    """Return one way's figures as text."""
    return (
        f"wall {cost.wall:7.1f} s   cpu {cost.cpu:7.1f} s   resident {cost.resident / 1e6:7.0f} MB"
        f"   extra disk {cost.disk / 1e6:7.0f} MB"
    )


def report(costs: dict[str, list[Cost]]) -> None:
    """Print medians and the ratio of wall times per round, because other load affects both sides of
    a round.
    """
    middle = {
        way: Cost(
            *(
                statistics.median(values)
                for values in zip(*((c.wall, c.cpu, c.resident, c.disk) for c in runs), strict=True)
            )
        )
        for way, runs in costs.items()
    }
    for way, cost in middle.items():
        print(f"{way:12} {line(cost)}   (median of {len(costs[way])})")
    if len(costs) == 2:
        pairs = list(zip(costs["one pass"], costs["two steps"], strict=True))
        walls = [one.wall / two.wall for one, two in pairs]
        cpu = statistics.median(one.cpu / two.cpu for one, two in pairs)
        print(
            f"wall {statistics.median(walls):.2f} of the two steps' (rounds: {', '.join(f'{x:.2f}' for x in walls)})",
            end="",
        )
        print(f", CPU time {cpu:.2f}")


def same(ours: Path, theirs: Path) -> None:
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
