#!/usr/bin/env python3
"""Kill `llmcli quantize` at random moments, resume it, and compare its file with an uninterrupted
run.

usage: .venv/bin/python scripts/crash/quantize.py SRC [--type Q4_K_M] [--rounds 30] [-t N]
       [--seed 0] [--work FOLDER]

SRC is a checkpoint folder or a GGUF file. A round starts the command, kills it with SIGKILL after a
random time of at most the uninterrupted duration, and repeats it until a run ends before its kill.
The file's sha256 must equal that of the uninterrupted run. The script prints a line per round and
exits with 1 if a file differs.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Parse the flags, run, kill, resume and compare; exit with 1 if a file differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="folder for the files; default: a temporary folder"
    )
    args = parser.parse_args()
    rng, n_same = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory(dir=args.work) as temporary:
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "quantize",
            str(args.source.absolute()),
            "--type",
            args.type,
        ]
        words += ["--threads", str(args.threads), "--json", "-o"]
        began = time.monotonic()
        reference = Path(temporary) / "whole.gguf"
        stdout = subprocess.run(
            [*words, reference], cwd=ROOT, check=True, capture_output=True
        ).stdout
        longest = time.monotonic() - began
        expected = digest(reference)
        assert json.loads(stdout)["sha256"] == expected, "the command prints another sha256"
        print(
            f"uninterrupted: {longest:.1f} s, {reference.stat().st_size / 1e6:.0f} MB, sha256 {expected}",
            flush=True,
        )
        for number in range(1, args.rounds + 1):
            out = Path(temporary) / "out.gguf"
            kills, document = until_finished([*words, out], longest, rng)
            same = digest(out) == expected == document["sha256"]
            n_same += same
            leftovers = [
                file.name for file in Path(temporary).iterdir() if file not in (reference, out)
            ]
            resumed = f"{document['resumed_bytes'] / 1e6:.1f} MB resumed by the last run"
            print(
                f"{number:3}  killed {kills} times  {resumed}  {'same' if same else 'DIFFERS'} {leftovers or ''}",
                flush=True,
            )
            out.unlink()
    print(f"{n_same} of {args.rounds} are the same")
    raise SystemExit(n_same != args.rounds)


def until_finished(
    words: list[str | Path], longest: float, rng: random.Random
) -> tuple[int, dict[str, object]]:
    """Start and kill the command until a run ends before its kill. Return the number of kills and
    the JSON document of the last run. If no run was killed, delete the file and start again.

    `longest`: the largest number of seconds before a kill.
    """
    kills = 0
    while True:
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.DEVNULL)
            try:
                child.wait(rng.uniform(0, longest))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills += 1
                continue
            output.seek(0)
            if child.returncode:
                raise SystemExit(f"the run ended with {child.returncode}: {output.read().decode()}")
            if kills:
                return kills, json.loads(output.read())
        words[-1].unlink()  # the first run ended before its kill: start again


def digest(file: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    main()
