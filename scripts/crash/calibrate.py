#!/usr/bin/env python3
"""Kill commands that measure a model at random moments, and compare with an uninterrupted run.

usage: .venv/bin/python scripts/crash/calibrate.py MODEL.gguf --text FILE [--rounds 10]
       [--threads N] [--bpw 5] [--seed 0] [--work FOLDER]
       [--only calibrate,sensitivity,sequential,verify]

The commands are calibrate, --target-bpw with --sensitivity, gptq --sequential, and --verify. MODEL
has float weights. A round starts the command, kills it with SIGKILL after a random time of at most
the uninterrupted duration, and repeats it until a run ends by itself. The result must equal the
uninterrupted one: byte for byte for calibrate's importance matrix and moments, by sha256, types and
figures (without times) for the others. Every round has its own home folder. A round that finishes
before it is killed starts again. The script prints a line per round and exits with 1 if one
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

# Keys that differ between runs: times, paths, and figures of tensors that only an unbroken run
# quantizes itself.
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
    """Run, kill, resume and compare each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bpw", default="5", help="bits per weight for --sensitivity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="folder for the files; default: a temporary folder"
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
        # one importance matrix for all rounds, because files contain its path
        made = Path(place, "made")
        until_finished(
            ["calibrate", model, "-o", "../sums.gguf", "--text", text, *threads], made, None, chance
        )
        for name in asked.only.split(","):
            began = time.monotonic()
            expected = until_finished(commands[name], Path(place, name, "whole"), None, chance)[1]
            longest = time.monotonic() - began
            print(f"{name}: uninterrupted {longest:.1f} s", flush=True)
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
    print(f"{wrong} differ" if wrong else "all are the same")
    raise SystemExit(bool(wrong))


def until_finished(
    words: list[str], place: Path, longest: float | None, chance: random.Random
) -> tuple[int, dict[str, object]]:
    """Run a command in a folder until it ends; return the number of kills and the result.

    With `longest`, kill it after random times of at most that many seconds; a run that was never
    killed is repeated from scratch.
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
        shutil.rmtree(place)  # It ended before its kill time: start again with an empty folder.
        place.mkdir()


def left(place: Path, document: dict[str, Any]) -> dict[str, object]:
    """Return a run's files and document without times.

    A certificate contains times, and so does the file that embeds it; its tensors' sha256 values
    are compared instead.
    """
    files = sorted(file for file in place.iterdir() if file.is_file())
    found: dict[str, object] = {"files": [file.name for file in files]}
    # a file that was finished before the run says nothing about types
    if "certificate" in document:
        document = document["certificate"]
    else:
        found |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return found | timeless(document)


def timeless(value: Any) -> Any:
    """Return a document without the values that differ between runs."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
