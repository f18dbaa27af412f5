#!/usr/bin/env python3
"""Kill a quantization at random moments until it finishes, and compare with an uninterrupted run.

usage: .venv/bin/python scripts/crash/quantize.py SRC [-t Q4_K_M] [--rounds 30] [--threads N]
       [--seed 0] [--work FOLDER]

SRC is a checkpoint folder or a GGUF. A round starts `llmcli quantize`, kills it with SIGKILL after
a random time of at most the uninterrupted duration, and repeats the command until a run ends by
itself. The file's sha256 must equal that of the uninterrupted run. The script prints a line per
round and exits with 1 if one differs.
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
    """Run, kill, resume and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("-t", "--type", default="Q4_K_M")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="folder for the files; default: a temporary folder"
    )
    asked = parser.parse_args()
    chance, good = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory(dir=asked.work) as place:
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "quantize",
            str(asked.source.absolute()),
            "-t",
            asked.type,
        ]
        words += ["--threads", str(asked.threads), "--json", "-o"]
        began = time.monotonic()
        whole = Path(place) / "whole.gguf"
        said = subprocess.run([*words, whole], cwd=ROOT, check=True, capture_output=True).stdout
        longest = time.monotonic() - began
        expected = digest(whole)
        assert json.loads(said)["sha256"] == expected, "the command prints another sha256"
        print(
            f"uninterrupted: {longest:.1f} s, {whole.stat().st_size / 1e6:.0f} MB, sha256 {expected}",
            flush=True,
        )
        for number in range(1, asked.rounds + 1):
            out = Path(place) / "out.gguf"
            kills, document = until_finished([*words, out], longest, chance)
            same = digest(out) == expected == document["sha256"]
            good += same
            left = [file.name for file in Path(place).iterdir() if file not in (whole, out)]
            resumed = f"{document['resumed_bytes'] / 1e6:.1f} MB resumed by the last run"
            print(
                f"{number:3}  killed {kills} times  {resumed}  {'same' if same else 'DIFFERS'} {left or ''}",
                flush=True,
            )
            out.unlink()
    print(f"{good} of {asked.rounds} are the same")
    raise SystemExit(good != asked.rounds)


def until_finished(
    words: list[str | Path], longest: float, chance: random.Random
) -> tuple[int, dict[str, object]]:
    """Start and kill until a run ends by itself; return the number of kills and the last document."""
    kills = 0
    while True:
        with tempfile.TemporaryFile() as said:
            child = subprocess.Popen(words, cwd=ROOT, stdout=said, stderr=subprocess.DEVNULL)
            try:
                child.wait(chance.uniform(0, longest))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills += 1
                continue
            said.seek(0)
            if child.returncode:
                raise SystemExit(f"the run ended with {child.returncode}: {said.read().decode()}")
            if kills:
                return kills, json.loads(said.read())
        words[-1].unlink()  # it ended before its kill time: run it again


def digest(file: Path) -> str:
    """Return a file's sha256."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    main()
