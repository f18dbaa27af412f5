#!/usr/bin/env python3
"""Kill `llmcli batch` at random moments, resume it, and compare its output with an uninterrupted
run.

usage: .venv/bin/python scripts/crash/batch.py REF IN.jsonl [--kills 20] [--seed 0]
       [--work FOLDER] [-- FLAGS of batch]

The uninterrupted run is first and is timed. In each round after it, the same command is started and
killed with SIGKILL until one run ends before its kill, or until there were --kills kills. A last
run completes the output, and its sha256 must equal that of the uninterrupted run. Kills alternate
between two kinds of moments: a random time of at most start-up plus a fifth of the answering time,
and a moment shortly after a random number of new lines is in the journal. The script prints a line
per kill and round, and exits with 1 if an output differs. Without --reproducible among FLAGS,
outputs may differ where two tokens have almost equal logits (llmcli/runtime/reproducible.py).
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
# Kills are within the first fifth of the answering time, so that one output gets several kills.
SHARE = 5


def main() -> None:
    """Parse the flags, run, kill, resume and compare; exit with 1 if an output differs."""
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
    args, flags = parser.parse_known_args()
    flags = [word for word in flags if word != "--"]
    rng, n_same, rounds, kills = random.Random(args.seed), 0, 0, 0
    with tempfile.TemporaryDirectory(dir=args.work) as temporary:
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "batch",
            args.ref,
            str(args.lines.absolute()),
            *flags,
            "--json",
        ]
        began = time.monotonic()
        expected, document = run_to_end(words, Path(temporary) / "whole.jsonl")
        longest = time.monotonic() - began
        start = longest - document["elapsed_ms"] / 1000
        print(
            f"uninterrupted: {document['lines']} lines, {longest:.1f} s, {start:.1f} s of them start-up, sha256 {expected}"
        )
        while kills < args.kills:
            rounds += 1
            out = Path(temporary) / f"out{rounds}.jsonl"
            kills += kill_until_finished(
                [*words, "-o", str(out)],
                out,
                (start, (longest - start) / SHARE),
                rng,
                args.kills - kills,
            )
            sha256, document = run_to_end(words, out)
            same = sha256 == expected
            n_same += same
            leftovers = [
                file.name for file in Path(temporary).iterdir() if file.name.startswith(".")
            ]
            print(
                f"round {rounds}: {'same' if same else 'DIFFERS'}, {kills} kills so far, the last run resumed "
                f"{document['resumed_lines']} lines {leftovers or ''}",
                flush=True,
            )
    print(f"{kills} kills, {n_same} of {rounds} files the same")
    raise SystemExit(n_same != rounds)


def kill_until_finished(
    words: list[str], out: Path, times: tuple[float, float], rng: random.Random, max_kills: int
) -> int:
    """Start and kill the command until one run ends before its kill, or until `max_kills` runs were
    killed. Return the number of kills.

    `out`: the batch's output file. `times`: the seconds of start-up, and the largest number of
    seconds between start-up and a kill.
    """
    start, span = times
    for number in range(max_kills):
        child = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if number % 2:
            target_lines = journal_lines(out) + rng.randint(1, 12)
            while child.poll() is None and journal_lines(out) < target_lines:
                time.sleep(0.01)
            seconds = rng.uniform(0, 0.5)
        else:
            seconds = rng.uniform(0, start + span)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            print(f"  killed; the journal has {journal_lines(out)} lines", flush=True)
        else:
            return number
    return max_kills


def journal_lines(out: Path) -> int:
    """Return the number of answers in the journal of an output file, or 0 without a journal."""
    journal = out.with_name(f".{out.name}.journal")
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def run_to_end(words: list[str], out: Path) -> tuple[str, dict[str, Any]]:
    """Run the command to its end with the output file `out`; return the file's sha256 and the JSON
    document that the command prints. Raises SystemExit if it prints nothing.
    """
    done = subprocess.run(
        [*words, "-o", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(f"the run ended with {done.returncode}: {done.stderr}")
    with out.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), json.loads(done.stdout)


if __name__ == "__main__":
    main()
