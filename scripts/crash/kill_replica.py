"""Kill one of two models under load and count what happens to every request or batch line.

    .venv/bin/python scripts/crash/kill_replica.py serve|batch [REF] [--requests 60] [--clients 6]
        [--samples 1]

It needs llmcli[ray]. `serve` serves REF (default: smollm2:135m) with two replicas on loopback. The
clients send requests without a pause, half of them as streams, each with `--samples` answers. A
replica's process is killed with SIGKILL after a third of the requests. Every answer must be
complete, also in streams that had already begun. "told" counts streams that ended in an error
event, "lost" counts requests without a complete answer and without an error.

`batch` answers the same number of lines with `--reproducible` on one model without Ray, then on two
models through Ray Data. One of its processes is killed after a part of the output exists. The two
outputs must have the same bytes.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.crash.under_load import load, told


def main() -> int:
    """Run one test; return 1 if a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("serve", "batch"))
    parser.add_argument("ref", nargs="?", default="smollm2:135m")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--samples", type=int, default=1)
    given = parser.parse_args()
    return served(given) if given.what == "serve" else batched(given)


def served(given: argparse.Namespace) -> int:
    """Send requests to two replicas."""
    words = (
        "serve",
        given.ref,
        "--port",
        "0",
        "--replicas",
        "2",
        "-t",
        "1",
        "-c",
        "2048",
        "--json",
    )
    began = time.monotonic()
    with subprocess.Popen(
        (sys.executable, "-m", "llmcli.app", *words), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout
            url = json.loads(server.stdout.readline())["url"]
            print(f"two replicas are ready after {time.monotonic() - began:.1f} s")
            counted = asyncio.run(
                load(url, given.requests, given.clients, given.tokens, killed, given.samples)
            )
        finally:
            server.terminate()
    good = told(counted) and not counted["failed"] and not counted["told"]
    print("no request was lost or failed" if good else "requests were LOST or failed")
    return 0 if good else 1


async def killed() -> None:
    """Kill a replica in the middle of the load."""
    print(f"killed replica {kill_one()}")


def batched(given: argparse.Namespace) -> int:
    """Answer a batch with two models."""
    with tempfile.TemporaryDirectory() as folder:
        lines, one, two = (Path(folder) / name for name in ("in.jsonl", "one.jsonl", "two.jsonl"))
        with lines.open("w") as file:
            for number in range(given.requests):
                said = [{"role": "user", "content": f"What comes after {number}?"}]
                file.write(json.dumps({"messages": said, "max_tokens": given.tokens}) + "\n")
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "batch",
            given.ref,
            str(lines),
            "-t",
            "1",
            "-c",
            "4096",
            "-np",
            "2",
        ]
        words += ["--reproducible", "--temp", "0"]
        subprocess.run([*words, "-o", str(one)], check=True)
        with subprocess.Popen(
            [*words, "-o", str(two), "--ray", "local", "--replicas", "2"]
        ) as spread:
            journal = two.with_name(f".{two.name}.journal")
            while spread.poll() is None and not (
                journal.exists() and journal.read_bytes().count(b"\n") > 8
            ):
                time.sleep(0.1)
            print(f"killed actor {kill_one(b'ray::MapWorker')}")
        same = spread.returncode == 0 and one.read_bytes() == two.read_bytes()
    print("the same bytes" if same else "the files DIFFER")
    return 0 if same else 1


def kill_one(name: bytes = b"ray::ServeReplica") -> int:
    """Kill the first process that serves a model."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and name in (entry / "cmdline").read_bytes():
            os.kill(int(entry.name), signal.SIGKILL)
            return int(entry.name)
    raise SystemExit("there is no model to kill")


if __name__ == "__main__":
    sys.exit(main())
