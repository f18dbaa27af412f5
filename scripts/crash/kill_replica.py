"""Kill one of two replicas of a model under load, and check that no request or batch line is lost.

usage: .venv/bin/python scripts/crash/kill_replica.py serve|batch [REF] [--requests 60]
       [--clients 6] [--samples 1]

The script needs llmcli[ray]. `serve` serves REF (default: smollm2:135m) with two replicas on
loopback. The clients send requests without a pause, half of them as streams, each with `--samples`
answers. One replica's process is killed with SIGKILL after a third of the requests. Every answer
must be complete, also in streams that had already begun. In the printed counts, "told" are streams
that ended in an error event, and "lost" are requests without a complete answer and without an
error.

`batch` answers the same number of lines with `--reproducible` twice: on one model without Ray, then
on two models through Ray Data. One of Ray's processes is killed when a part of the output exists.
The two outputs must have the same bytes.
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

from scripts.crash.under_load import load, print_counts


def main() -> int:
    """Parse the flags and run one of the two tests; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("serve", "batch"))
    parser.add_argument("ref", nargs="?", default="smollm2:135m")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--samples", type=int, default=1)
    args = parser.parse_args()
    return check_serve(args) if args.what == "serve" else check_batch(args)


def check_serve(args: argparse.Namespace) -> int:
    """Run the test `serve`; return 1 if a request failed or was lost."""
    words = (
        "serve",
        args.ref,
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
            counts = asyncio.run(
                load(url, args.requests, args.clients, args.tokens, kill_replica, args.samples)
            )
        finally:
            server.terminate()
    nothing_lost = print_counts(counts) and not counts["failed"] and not counts["told"]
    print("no request was lost or failed" if nothing_lost else "requests were LOST or failed")
    return 0 if nothing_lost else 1


async def kill_replica() -> None:
    """Kill one replica and print its process id; an event for `load`."""
    print(f"killed replica {kill_process()}")


def check_batch(args: argparse.Namespace) -> int:
    """Run the test `batch`; return 1 if the two outputs differ."""
    with tempfile.TemporaryDirectory() as folder:
        lines, single, distributed = (
            Path(folder) / name for name in ("in.jsonl", "one.jsonl", "two.jsonl")
        )
        with lines.open("w") as file:
            for number in range(args.requests):
                messages = [{"role": "user", "content": f"What comes after {number}?"}]
                file.write(json.dumps({"messages": messages, "max_tokens": args.tokens}) + "\n")
        words = [
            sys.executable,
            "-m",
            "llmcli.app",
            "batch",
            args.ref,
            str(lines),
            "-t",
            "1",
            "-c",
            "4096",
            "-np",
            "2",
        ]
        words += ["--reproducible", "--temp", "0"]
        subprocess.run([*words, "-o", str(single)], check=True)
        with subprocess.Popen(
            [*words, "-o", str(distributed), "--ray", "local", "--replicas", "2"]
        ) as process:
            journal = distributed.with_name(f".{distributed.name}.journal")
            while process.poll() is None and not (
                journal.exists() and journal.read_bytes().count(b"\n") > 8
            ):
                time.sleep(0.1)
            print(f"killed actor {kill_process(b'ray::MapWorker')}")
        same = process.returncode == 0 and single.read_bytes() == distributed.read_bytes()
    print("the same bytes" if same else "the files DIFFER")
    return 0 if same else 1


def kill_process(name: bytes = b"ray::ServeReplica") -> int:
    """Kill the first process whose command line contains `name`; return its process id. Raises
    SystemExit if there is none.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and name in (entry / "cmdline").read_bytes():
            os.kill(int(entry.name), signal.SIGKILL)
            return int(entry.name)
    raise SystemExit("there is no model to kill")


if __name__ == "__main__":
    sys.exit(main())
