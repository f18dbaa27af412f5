"""Measure `llmcli pull --quant` from a hub on loopback: quantizing directly from the hub, and
quantizing after a download.

usage: .venv/bin/python scripts/benchmarks/pull.py [FOLDER] [--megabytes 400] [--type Q4_K_M]
       [--share 0.05] [--seed 1] [--kills 5]

FOLDER is a checkpoint; by default a Llama of random BF16 weights is made. Both ways run without
faults and with faults, where the hub drops, stalls or truncates `--share` of its answers. For each
of these four pulls the script prints seconds, requests, peaks of disk and memory, and the sha256 of
the file. It fails unless all files are equal and the disk peak of quantizing directly is at most
1.1 times the file. With `--kills`, another pull is killed that many times at random moments and
resumed each time.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "tests" / "data" / "stories260K"
CLIENT = """
from llmcli.catalog.hub import exchange
exchange.TIMEOUT_SECONDS = {patience}
from llmcli.app import main
main()
"""


@dataclass(frozen=True)
class Outcome:
    """The cost of one pull and its file. `disk` and `memory` are peaks in bytes, `faults` counts
    the hub's faults by kind, and `sha256` and `nbytes` describe the finished file.
    """

    seconds: float
    requests: int
    faults: dict[str, int]
    disk: int
    memory: int
    sha256: str
    nbytes: int


def pull(
    url: str, home: Path, words: list[str], patience: float
) -> tuple[float, int, int, dict[str, object]]:
    """Run one pull in another process. Return its seconds, its peak disk and peak memory in bytes,
    and its JSON document. `patience`: seconds without a byte after which it drops a connection.
    """
    env = {
        **os.environ,
        "HF_ENDPOINT": url,
        "LLMCLI_HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "PYTHONPATH": "",
    }
    command = [
        sys.executable,
        "-c",
        CLIENT.format(patience=patience),
        "pull",
        "org/measured",
        *words,
        "--json",
    ]
    began, disk, memory = time.monotonic(), 0, 0
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err) as process:
            while process.poll() is None:
                disk, memory = max(disk, disk_usage(home)), max(memory, peak_memory(process.pid))
                time.sleep(0.02)
        seconds = time.monotonic() - began
        out.seek(0)
        if process.returncode:
            err.seek(0)
            raise SystemExit(
                f"pull {' '.join(words)} failed with {process.returncode}: {err.read().decode()}"
            )
        return seconds, max(disk, disk_usage(home)), memory, json.load(out)


def pull_with_kills(
    folder: Path, words: list[str], args: argparse.Namespace, seconds: float
) -> tuple[list[int], str]:
    """Kill a pull `args.kills` times, then let it finish. Return the bytes of the file that were
    done at each kill, and the sha256 of the finished file. `seconds` is the time of a whole pull.
    """
    from tests.fixtures.fake_hub import Faults, Hub

    rng, done_at_kills = random.Random(args.seed), []
    with Hub() as hub, tempfile.TemporaryDirectory() as name:
        home = Path(name)
        hub.add("org/measured", folder)
        hub.faults = Faults(args.seed, args.share)
        env = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "LLMCLI_HOME": name,
            "HF_HOME": str(home / "hf"),
        }
        command = [
            sys.executable,
            "-c",
            CLIENT.format(patience=args.patience),
            "pull",
            "org/measured",
            *words,
        ]
        for _ in range(args.kills):
            with subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as process:
                time.sleep(rng.uniform(0.2, 0.8) * seconds)
                if process.poll() is not None:
                    break  # it ended before the kill
                process.kill()
            journal = [
                json.loads(line)
                for path in home.rglob(".*.journal")
                for line in path.read_text().splitlines()
            ]
            done_at_kills.append(max((note.get("bytes", 0) for note in journal), default=0))
        document = pull(hub.url, home, words, args.patience)[3]
    return done_at_kills, str(document["sha256"])


def disk_usage(home: Path) -> int:
    """Return the bytes of disk blocks that a folder's files occupy."""
    total = 0
    for path in list(home.rglob("*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # renamed in the meantime
    return total


def peak_memory(pid: int) -> int:
    """Return the peak resident memory of a process in bytes, or 0 if the system does not report
    it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def measure(
    folder: Path, words: list[str], seed: int | None, share: float, patience: float
) -> Outcome:
    """Run one pull with a new hub and a new home folder. `seed` is the seed of the hub's faults;
    None means no faults.
    """
    from tests.fixtures.fake_hub import Faults, Hub

    with Hub() as hub, tempfile.TemporaryDirectory() as home:
        hub.add("org/measured", folder)
        hub.redirects = hub.lasting = True
        hub.faults = None if seed is None else Faults(seed, share)
        seconds, disk, memory, document = pull(hub.url, Path(home), words, patience)
        fault_counts = dict(Counter(hub.faults.happened)) if hub.faults else {}
        size = Path(str(document["path"])).stat().st_size
        n_requests = len(hub.requests) + len(hub.elsewhere)
        return Outcome(
            seconds, n_requests, fault_counts, disk, memory, str(document["sha256"]), size
        )


def make_checkpoint(megabytes: int, target: Path) -> Path:
    """Write a random BF16 checkpoint of about this size to `target`, and return the folder."""
    from tests.quant import tiny_checkpoint

    hidden = 1024
    layer = 2 * hidden * hidden * (3 + 3 * 11 / 4)
    return tiny_checkpoint.random_llama(
        STORIES, target, hidden=hidden, layers=max(1, math.ceil(megabytes * 1e6 / layer)), shards=4
    )


def main() -> None:
    """Parse the flags, run all pulls and compare; exit with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument(
        "--patience",
        type=float,
        default=5.0,
        help="seconds without a byte after which an answer counts as stalled",
    )
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or make_checkpoint(args.megabytes, Path(temporary) / "measured")
        source = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{source / 1e6:.0f} MB of safetensors to {args.type}")
        print(
            f"{'way':30} {'wall s':>7} {'requests':>8} {'disk':>9} {'/output':>7} {'memory':>8}  sha256, faults"
        )
        outcomes = []
        for seed in (None, args.seed):
            for name, flags in (("direct", []), ("download, then quantize", ["--keep-source"])):
                outcome = measure(
                    folder, ["--quant", args.type, *flags], seed, args.share, args.patience
                )
                outcomes.append(outcome)
                label = name + ("" if seed is None else ", faults")
                ratio = outcome.disk / outcome.nbytes
                print(
                    f"{label:30} {outcome.seconds:7.1f} {outcome.requests:8} {outcome.disk / 1e6:6.0f} MB {ratio:7.2f} "
                    f"{outcome.memory / 1e6:5.0f} MB  {outcome.sha256[:16]}  {outcome.faults or ''}"
                )
        hashes = {outcome.sha256 for outcome in outcomes}
        if args.kills:
            done_at_kills, sha256 = pull_with_kills(
                folder, ["--quant", args.type], args, outcomes[0].seconds
            )
            megabytes = ", ".join(f"{count / 1e6:.0f}" for count in done_at_kills)
            print(
                f"killed {len(done_at_kills)} times, with {megabytes} MB of the file done: {sha256[:16]}"
            )
            hashes.add(sha256)
    same = len(hashes) == 1
    small_disk = all(outcome.disk <= 1.1 * outcome.nbytes for outcome in outcomes[::2])
    print(
        f"the same file: {same}; direct, the disk never held more than 1.1 times the file: {small_disk}"
    )
    raise SystemExit(not (same and small_disk))


if __name__ == "__main__":
    main()
