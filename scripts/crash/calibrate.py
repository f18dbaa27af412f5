#!/usr/bin/env python3
"""Kills what measures a model (calibrate, --target-bpw with --sensitivity, gptq --sequential,
--verify) at random moments, again and again until it finishes, and compares with an unbroken run.

usage: .venv/bin/python scripts/crash/calibrate.py MODEL.gguf --text FILE [--rounds
10] [--threads N]
       [--bpw 5] [--seed 0] [--work FOLDER] [--only calibrate,sensitivity,sequential,verify]

MODEL is of floats. A round starts the command, kills it with SIGKILL after a random time up to what
an unbroken run takes, and gives it again until one ends by itself; what it left must be the
unbroken run's: calibrate's importance matrix and moments byte for byte, the others' file by its
sha256, with the types and figures told, but no times. Every round has a home of its own. A round
that was through before it was killed begins anew. Prints a line a round, and exits with 1 if one
differs.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# What differs from run to run: times, places, and what is told of those tensors only that a run
# made itself.
TIMES = {
    "elapsed_ms",
    "seconds",
    "speed",
    "date",
    "resumed",
    "resumed_bytes",
    "resumed_tensors",
    "resumed_chunks",
    "path",
    "files",
    "present",
    "relative_rmse",
    "rows_left",
    "damped",
}


def main() -> None:
    """Run, kill, resume, compare, command by command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bpw", default="5", help="bits a weight of what --sensitivity goes with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="where the files go; a folder of the system's unless told"
    )
    parser.add_argument("--only", default="calibrate,sensitivity,sequential,verify")
    asked = parser.parse_args()
    model, text, threads = (
        str(asked.model.absolute()),
        str(asked.text.absolute()),
        ["--threads", str(asked.threads)],
    )
    quantize = ["quantize", model, "-o", "out.gguf", *threads]
    gptq = ["-t", "Q4_K_M", "--method", "gptq", "--sequential", "--calibration", text]
    commands = {
        "calibrate": [
            "calibrate",
            model,
            "-o",
            "sums.gguf",
            "--moments",
            "moments.gguf",
            "--text",
            text,
            *threads,
        ],
        "sensitivity": [*quantize, "--target-bpw", asked.bpw, "--sensitivity", "--text", text],
        "sequential": [*quantize, *gptq, "--imatrix", "../../sums.gguf"],
        "verify": [*quantize, "-t", "Q4_K_M", "--verify", "--verify-text", text],
    }
    chance, wrong = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory(dir=asked.work) as place:
        made = Path(place, "made")  # one importance matrix for all rounds: files tell its place
        until_finished(
            ["calibrate", model, "-o", "../sums.gguf", "--text", text, *threads], made, None, chance
        )
        for name in asked.only.split(","):
            began = time.monotonic()
            expected = until_finished(commands[name], Path(place, name, "whole"), None, chance)[1]
            longest = time.monotonic() - began
            print(f"{name}: unbroken {longest:.1f} s", flush=True)
            for number in range(1, asked.rounds + 1):
                kills, found = until_finished(
                    commands[name], Path(place, name, str(number)), longest, chance
                )
                other = sorted(
                    key
                    for key in expected.keys() | found.keys()
                    if expected.get(key) != found.get(key)
                )
                wrong += bool(other)
                verdict = f"DIFFERS: {', '.join(other)}" if other else "same"
                print(f"{number:3}  killed {kills} times  {verdict}", flush=True)
    print(f"{wrong} differ" if wrong else "all the same")
    raise SystemExit(bool(wrong))


def until_finished(
    words: list[str], place: Path, longest: float | None, chance: random.Random
) -> tuple[int, dict[str, object]]:
    """Start in a folder, and kill where `longest` is told, until a run that was killed before ends
    by itself: how often, and what it left.
    """
    place.mkdir(parents=True)
    env = os.environ | {"LLMCLI_HOME": str(place / "home")}
    command, kills = [sys.executable, "-m", "llmcli.app", *words, "--json"], 0
    while True:
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
            child = subprocess.Popen(command, cwd=place, env=env, stdout=said, stderr=complained)
            try:
                child.wait(chance.uniform(0, longest) if longest and kills < 100 else None)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills += 1
                continue
            said.seek(0)
            complained.seek(0)
            if child.returncode:
                raise SystemExit(
                    f"the run ended with {child.returncode}: {complained.read().decode()[-2000:]}"
                )
            if kills or longest is None:
                return kills, left(place, json.loads(said.read()))
        shutil.rmtree(place)  # it was through before its time had come: once more, from nothing
        place.mkdir()


def left(place: Path, document: dict[str, Any]) -> dict[str, object]:
    """What a run left behind and told, but for times. A certificate holds some, and so does its
    file, whose tensors' sha256 it tells.
    """
    files = sorted(file for file in place.iterdir() if file.is_file())
    found: dict[str, object] = {"files": [file.name for file in files]}
    if "certificate" in document:  # of the types nothing is told where the file was finished before
        document = document["certificate"]
    else:
        found |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return found | timeless(document)


def timeless(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
