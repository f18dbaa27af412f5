"""Compare a model over two RPC workers with the same model in this process: tokens, logits, speed.

    .venv/bin/python scripts/crash/rpc_workers.py MODEL.gguf [--tokens 64] [--prompt 128] [--rounds
    3]

Two worker processes run on loopback; then, as root and with `ip`, one runs in each of two network
namespaces behind a veth pair. Greedy tokens follow a fixed prompt, with a q8_0 cache and one thread
everywhere. There are three ways to compute them. "here" is `run`, where llama.cpp repacks matrices
for this CPU. "plain" keeps the matrices as the file has them, which is what a worker does. The
third way is over the workers. Tokens and the bits of all logits over the workers must equal
"plain", because the same kernels run. "here" may round differently, and is reported. The ways run
in turn, and the median of the rounds counts.

Then a worker of `serve --rpc` is killed under load and restarted. Each request must be answered
completely, also streams that had begun, or get an error status ("failed"). A stream that ends in an
error event ("told") or without one ("lost") is a failure.
"""

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.crash.under_load import load, told

SUBNET = "10.213"
NAMES = ("llmcli-rpc-a", "llmcli-rpc-b")


def main() -> int:
    """Run the tests that this machine allows; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        print(json.dumps(inside(given)))
        return 0
    good = compare("loopback, two processes", loopback, given)
    good &= lost(given)
    if os.geteuid() or not shutil.which("ip"):
        print("two network namespaces: skipped, they need root and `ip`")
    else:
        good &= compare("two network namespaces", namespaces, given)
    return 0 if good else 1


def compare(title: str, place: Any, given: argparse.Namespace) -> bool:
    """Run all ways in turn; return whether the workers gave the bits of "plain"."""
    with place() as endpoints:
        ways = {"here": "here", "plain": "plain", "workers": ",".join(endpoints)}
        rounds: dict[str, list[Any]] = {name: [] for name in ways}
        for _ in range(given.rounds):
            for name, how in ways.items():
                words = [sys.executable, __file__, str(given.model), "--inside", how]
                words += ["--tokens", str(given.tokens), "--prompt", str(given.prompt)]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                rounds[name].append(json.loads(done.stdout))
    first = {name: found[0] for name, found in rounds.items()}
    for name, found in rounds.items():
        rates = [
            statistics.median(one[part] for one in found)
            for part in ("prompt_per_second", "tokens_per_second")
        ]
        print(f"{title}: {name:8} prompt {rates[0]:8.1f} tok/s, tokens {rates[1]:8.1f} tok/s")
        first[name]["rates"] = rates
    same = first["workers"]["tokens"] == first["plain"]["tokens"]
    bits = first["workers"]["logits"] == first["plain"]["logits"]
    agree = first["workers"]["tokens"] == first["here"]["tokens"]
    print(f"{title}: tokens as plain: {same}; logits to the bit: {bits}; tokens as here: {agree}")
    for other in ("plain", "here"):
        ratios = [
            a / b for a, b in zip(first["workers"]["rates"], first[other]["rates"], strict=True)
        ]
        print(f"{title}: speed against {other}: prompt {ratios[0]:.2f}, tokens {ratios[1]:.2f}")
    return same and bits


def lost(given: argparse.Namespace) -> bool:
    """Kill and restart a worker of `serve --rpc` under load; return whether no request was lost."""
    held = ExitStack()
    with held, ExitStack() as server:
        endpoint = held.enter_context(worker("127.0.0.1", 52903))
        words = (
            "serve",
            str(given.model),
            "--port",
            "0",
            "-t",
            "1",
            "-c",
            "2048",
            "--rpc",
            endpoint,
            "--json",
        )
        process = server.enter_context(
            subprocess.Popen(
                (sys.executable, "-m", "llmcli.app", *words), stdout=subprocess.PIPE, text=True
            )
        )
        server.callback(process.terminate)
        assert process.stdout
        url = json.loads(process.stdout.readline())["url"]

        async def kill() -> None:
            print("killed the worker")
            held.close()
            held.enter_context(worker("127.0.0.1", 52903))

        counted = asyncio.run(load(url, 40, 4, 16, kill))
    good = told(counted) and not counted["told"]
    print(
        "the worker killed under load: no request was lost"
        if good
        else "requests were LOST or broken"
    )
    return good


def inside(given: argparse.Namespace) -> dict[str, Any]:
    """Compute one way in this process."""
    from llmcli.hardware import rpc_workers
    from llmcli.runtime.binding.batch import BatchRows
    from llmcli.runtime.binding.context_options import ContextOptions
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.binding.open_context import open_context

    far = given.inside not in ("here", "plain")
    if far:
        rpc_workers.add_workers(rpc_workers.parse_endpoints(given.inside))
    options = ContextOptions(1024, 512, 512, 1, 1, 1, "q8_0", "q8_0", "on")
    layers = -1 if far else 0
    with (
        open_model(given.model, gpu_layers=layers, repack=given.inside == "here") as model,
        open_context(model, options) as context,
    ):
        tokens = [(7 + 101 * at) % model.n_vocab for at in range(given.prompt)]
        wants = [False] * (given.prompt - 1) + [True]
        began = time.perf_counter()
        (row,) = context.decode(BatchRows(tokens, range(given.prompt), [0] * given.prompt, wants))
        digest, found, middle = (
            hashlib.sha256(row.logits.tobytes()),
            [int(row.logits.argmax())],
            time.perf_counter(),
        )
        for at in range(given.tokens - 1):
            (row,) = context.decode(BatchRows([found[-1]], [given.prompt + at], [0], [True]))
            digest.update(row.logits.tobytes())
            found.append(int(row.logits.argmax()))
        seconds = time.perf_counter() - middle
    return {
        "tokens": found,
        "logits": digest.hexdigest(),
        "prompt_per_second": given.prompt / (middle - began),
        "tokens_per_second": (given.tokens - 1) / seconds,
    }


@contextmanager
def loopback() -> Iterator[list[str]]:
    """Start two workers on loopback."""
    with ExitStack() as stack:
        yield [stack.enter_context(worker("127.0.0.1", port)) for port in (52901, 52902)]


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Start two workers in network namespaces."""
    with ExitStack() as stack:
        yield [stack.enter_context(apart(name, number)) for number, name in enumerate(NAMES, 1)]


@contextmanager
def apart(name: str, number: int) -> Iterator[str]:
    """Start a worker in a network namespace."""
    ours, theirs = f"{SUBNET}.{number}.1", f"{SUBNET}.{number}.2"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    ip(f"netns add {name}")
    try:
        ip(f"link add llmcli{number} type veth peer name eth0 netns {name}")
        ip(f"addr add {ours}/30 dev llmcli{number}")
        ip(f"link set llmcli{number} up")
        ip(f"-n {name} addr add {theirs}/30 dev eth0")
        ip(f"-n {name} link set eth0 up")
        with worker(theirs, 50052, "ip", "netns", "exec", name) as endpoint:
            yield endpoint
    finally:
        ip(f"netns delete {name}")  # deletes the veth pair, too


def ip(words: str) -> None:
    """Run one iproute2 command."""
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def worker(host: str, port: int, *where: str) -> Iterator[str]:
    """Start a worker that listens."""
    words = (
        *where,
        sys.executable,
        "-m",
        "llmcli.app",
        "worker",
        "--rpc",
        "--host",
        host,
        "--port",
        str(port),
    )
    with subprocess.Popen(
        (*words, "-t", "1", "--allow-remote"), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            while "worker at" not in (line := process.stdout.readline()):
                assert line, "the worker did not start"
            yield f"{host}:{port}"
        finally:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
