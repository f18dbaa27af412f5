#!/usr/bin/env python3
"""Kill calibration and quantization commands at random moments, resume them, and compare the
results with uninterrupted runs.

usage: .venv/bin/python scripts/crash/calibrate.py MODEL.gguf --text FILE [--rounds 10]
       [-t N] [--bpw 5] [--seed 0] [--work FOLDER]
       [--only calibrate,sensitivity,sequential,verify]

The four commands are `llmcli calibrate`, and `llmcli quantize` with --target-bpw --sensitivity,
with --method gptq --sequential, and with --verify. MODEL.gguf must have float weights. A round
starts a command, kills it with SIGKILL after a random time of at most the uninterrupted duration,
and repeats it until a run ends before its kill. A round without any kill starts again. Every round
has its own LLMCLI_HOME. The result must equal the uninterrupted one: byte for byte for calibrate's
importance matrix and moments; by sha256, types and figures (without times) for the others. The
script prints a line per round and exits with 1 if a result differs.
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
VARYING_KEYS = {
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
    """Parse the flags; run, kill, resume and compare each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bpw", default="5", help="bits per weight for --sensitivity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="folder for the files; default: a temporary folder"
    )
    parser.add_argument("--only", default="calibrate,sensitivity,sequential,verify")
    args = parser.parse_args()
    model, text, threads = (
        str(args.model.absolute()),
        str(args.text.absolute()),
        ["--threads", str(args.threads)],
    )
    quantize = ["quantize", model, "-o", "out.gguf", *threads]
    gptq = ["--type", "Q4_K_M", "--method", "gptq", "--sequential", "--calibration", text]
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
        "sensitivity": [*quantize, "--target-bpw", args.bpw, "--sensitivity", "--text", text],
        "sequential": [*quantize, *gptq, "--imatrix", "../../sums.gguf"],
        "verify": [*quantize, "--type", "Q4_K_M", "--verify", "--verify-text", text],
    }
    rng, n_differing = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory(dir=args.work) as temporary:
        # All rounds use one importance matrix, because the quantized files contain its path.
        imatrix_folder = Path(temporary, "made")
        until_finished(
            ["calibrate", model, "-o", "../sums.gguf", "--text", text, *threads],
            imatrix_folder,
            None,
            rng,
        )
        for name in args.only.split(","):
            began = time.monotonic()
            expected = until_finished(commands[name], Path(temporary, name, "whole"), None, rng)[1]
            longest = time.monotonic() - began
            print(f"{name}: uninterrupted {longest:.1f} s", flush=True)
            for number in range(1, args.rounds + 1):
                kills, result = until_finished(
                    commands[name], Path(temporary, name, str(number)), longest, rng
                )
                differing_keys = sorted(
                    key
                    for key in expected.keys() | result.keys()
                    if expected.get(key) != result.get(key)
                )
                n_differing += bool(differing_keys)
                verdict = f"DIFFERS: {', '.join(differing_keys)}" if differing_keys else "same"
                print(f"{number:3}  killed {kills} times  {verdict}", flush=True)
    print(f"{n_differing} differ" if n_differing else "all are the same")
    raise SystemExit(bool(n_differing))


def until_finished(
    words: list[str], folder: Path, longest: float | None, rng: random.Random
) -> tuple[int, dict[str, object]]:
    """Run a command in `folder` until it ends; return the number of kills and the result.

    With `longest`, kill each run after a random time of at most that many seconds. If the first run
    ends before its kill, empty the folder and start again.
    """
    folder.mkdir(parents=True)
    env = os.environ | {"LLMCLI_HOME": str(folder / "home")}
    command, kills = [sys.executable, "-m", "llmcli.app", *words, "--json"], 0
    while True:
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            child = subprocess.Popen(command, cwd=folder, env=env, stdout=stdout, stderr=stderr)
            try:
                child.wait(rng.uniform(0, longest) if longest and kills < 100 else None)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills += 1
                continue
            stdout.seek(0)
            stderr.seek(0)
            if child.returncode:
                raise SystemExit(
                    f"the run ended with {child.returncode}: {stderr.read().decode()[-2000:]}"
                )
            if kills or longest is None:
                return kills, describe_result(folder, json.loads(stdout.read()))
        shutil.rmtree(folder)  # the first run ended before its kill: start again
        folder.mkdir()


def describe_result(folder: Path, document: dict[str, Any]) -> dict[str, object]:
    """Return what must be equal in every run: the files' names and sha256 values, and the JSON
    document without VARYING_KEYS.

    A certificate contains times, and so does the model file that embeds it. Such a run is compared
    by the certificate's figures and the tensors' sha256 values instead.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file())
    result: dict[str, object] = {"files": [file.name for file in files]}
    # A resumed run whose file was already finished prints no types, but the certificate has them.
    if "certificate" in document:
        document = document["certificate"]
    else:
        result |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return result | without_times(document)


def without_times(value: Any) -> Any:
    """Return a JSON value without VARYING_KEYS at any depth."""
    if isinstance(value, dict):
        return {
            key: without_times(inner) for key, inner in value.items() if key not in VARYING_KEYS
        }
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
