#!/usr/bin/env python3
"""Kills a batch at random moments, again and again until it finishes, and compares with an unbroken
run.

usage: .venv/bin/python scripts/crash/batch.py REF IN.jsonl [--kills 20] [--seed 0]
[--work FOLDER]
       [-- FLAGS of batch]

The unbroken run comes first and tells how long one takes. Then the same command is started and
killed with SIGKILL as often as asked, by turns after a random time (up to a fifth of the whole
beside the start) and a random moment after so many more lines are in the journal; then it is given
once more to end by itself. Where a run ends before it is killed, the next round begins. Each file's
sha256 must be the unbroken run's. Prints a line a kill and exits with 1 if one differs. Without
--reproducible among FLAGS near ties may fall otherwise (runtime/reproducible.py).
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# a run that is to be killed gets up to a fifth of the whole time, so that one file is killed
# several times
SHARE = 5


def main() -> None:
    """Run, kill, go on, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="where the files go; a folder of the system's unless told"
    )
    asked, flags = parser.parse_known_args()
    flags = [word for word in flags if word != "--"]
    chance, good, rounds, kills = random.Random(asked.seed), 0, 0, 0
    with tempfile.TemporaryDirectory(dir=asked.work) as place:
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "batch",
            asked.ref,
            str(asked.lines.absolute()),
            *flags,
            "--json",
        ]
        began = time.monotonic()
        whole, document = finish(words, Path(place) / "whole.jsonl")
        longest = time.monotonic() - began
        start = longest - document["elapsed_ms"] / 1000
        print(
            f"unbroken: {document['lines']} lines, {longest:.1f} s, {start:.1f} of them start, sha256 {whole}"
        )
        while kills < asked.kills:
            rounds += 1
            out = Path(place) / f"out{rounds}.jsonl"
            kills += killed(
                [*words, "-o", str(out)],
                out,
                (start, (longest - start) / SHARE),
                chance,
                asked.kills - kills,
            )
            found, document = finish(words, out)
            same = found == whole
            good += same
            left = [file.name for file in Path(place).iterdir() if file.name.startswith(".")]
            print(
                f"round {rounds}: {'same' if same else 'DIFFERS'}, {kills} kills so far, the last run took up "
                f"{document['resumed_lines']} lines {left or ''}",
                flush=True,
            )
    print(f"{kills} kills, {good} of {rounds} files the same")
    raise SystemExit(good != rounds)


def killed(
    words: list[str], out: Path, times: tuple[float, float], chance: random.Random, most: int
) -> int:
    """Start and kill until a run ends by itself or `most` were killed; how many were."""
    start, span = times
    for number in range(most):
        child = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if number % 2:
            more = there(out) + chance.randint(1, 12)
            while child.poll() is None and there(out) < more:
                time.sleep(0.01)
            seconds = chance.uniform(0, 0.5)
        else:
            seconds = chance.uniform(0, start + span)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            print(f"  killed; {there(out)} lines are there", flush=True)
        else:
            return number
    return most


def there(out: Path) -> int:
    """Lines that the journal holds."""
    journal = out.with_name(f".{out.name}.journal")
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def finish(words: list[str], out: Path) -> tuple[str, dict[str, Any]]:
    """Run to the end; the file's sha256 and what the run said."""
    done = subprocess.run(
        [*words, "-o", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(f"the run ended with {done.returncode}: {done.stderr}")
    with out.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), json.loads(done.stdout)


if __name__ == "__main__":
    main()
