#!/usr/bin/env python3
"""Kill a batch at random moments until it finishes, and compare its output with an uninterrupted
run.

usage: .venv/bin/python scripts/crash/batch.py REF IN.jsonl [--kills 20] [--seed 0]
       [--work FOLDER] [-- FLAGS of batch]

The uninterrupted run comes first and is timed. Then the same command is started and killed with
SIGKILL. Kills alternate between a random time (start-up plus up to a fifth of the remaining time)
and a random moment after a few more lines are in the journal. Finally the command runs to its end.
If a run ends before it is killed, the next round begins. Each output's sha256 must equal that of
the uninterrupted run. The script prints a line per kill and exits with 1 if an output differs.
Without --reproducible among FLAGS, near ties may be decided differently
(llmcli/runtime/reproducible.py).
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
# Only a fifth of the whole time, so that one file is killed several times.
SHARE = 5


def main() -> None:
    """Run, kill, resume and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="folder for the files; default: a temporary folder"
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
            f"uninterrupted: {document['lines']} lines, {longest:.1f} s, {start:.1f} s of them start-up, sha256 {whole}"
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
                f"round {rounds}: {'same' if same else 'DIFFERS'}, {kills} kills so far, the last run resumed "
                f"{document['resumed_lines']} lines {left or ''}",
                flush=True,
            )
    print(f"{kills} kills, {good} of {rounds} files the same")
    raise SystemExit(good != rounds)


def killed(
    words: list[str], out: Path, times: tuple[float, float], chance: random.Random, most: int
) -> int:
    """Start and kill until a run ends by itself or `most` runs were killed; return the number of
    kills.
    """
    start, span = times
    for number in range(most):
        child = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if number % 2:
            more = journal_lines(out) + chance.randint(1, 12)
            while child.poll() is None and journal_lines(out) < more:
                time.sleep(0.01)
            seconds = chance.uniform(0, 0.5)
        else:
            seconds = chance.uniform(0, start + span)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            print(f"  killed; the journal has {journal_lines(out)} lines", flush=True)
        else:
            return number
    return most


def journal_lines(out: Path) -> int:
    """Return the number of answers in the journal."""
    journal = out.with_name(f".{out.name}.journal")
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def finish(words: list[str], out: Path) -> tuple[str, dict[str, Any]]:
    """Run to the end; return the output's sha256 and the printed document."""
    done = subprocess.run(
        [*words, "-o", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(f"the run ended with {done.returncode}: {done.stderr}")
    with out.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), json.loads(done.stdout)


if __name__ == "__main__":
    main()
