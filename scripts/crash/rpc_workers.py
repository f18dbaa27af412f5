"""Compare a model that is spread over two RPC workers with the same model in one process, and kill
a worker under load.

usage: .venv/bin/python scripts/crash/rpc_workers.py MODEL.gguf [--tokens 64] [--prompt 128]
       [--rounds 3]

The two worker processes run on loopback; then, as root and with `ip`, in two network namespaces
behind veth pairs. Greedy tokens after a fixed prompt are computed in three ways, with a q8_0 cache
and one thread everywhere: "here" in one process as in `run`, where llama.cpp repacks matrices for
this CPU; "plain" in one process without repacking; and "workers", which do not repack either. The
tokens of "workers" and the bits of all their logits must equal those of "plain", because the same
kernels run. "here" may round differently, and is only reported. The ways run in turn, and the
median speed of the rounds counts.

Then a worker of `serve --rpc` is killed under load and restarted. Each request must be answered
completely, also in streams that had begun, or get an error status ("failed" in the printed counts).
A stream that ends in an error event ("told") or breaks off without one ("lost") fails the test.
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

from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from scripts.crash.under_load import load, print_counts

SUBNET = "10.213"
NAMES = ("llmcli-rpc-a", "llmcli-rpc-b")


def main() -> int:
    """Parse the flags and run the tests that this machine allows; return 1 if a test fails. With
    --inside, compute one way in this process and print the result instead.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        print(json.dumps(compute_one_way(args)))
        return 0
    passed = compare("loopback, two processes", loopback_workers, args)
    passed &= kill_worker_under_load(args)
    if os.geteuid() or not shutil.which("ip"):
        print("two network namespaces: skipped, they need root and `ip`")
    else:
        passed &= compare("two network namespaces", namespace_workers, args)
    return 0 if passed else 1


def compare(title: str, start_workers: Any, args: argparse.Namespace) -> bool:
    """Run the three ways in turn and print a comparison. Return whether the workers gave the same
    tokens and the same bits of the logits as "plain".

    `start_workers`: a context manager that yields the workers' endpoints.
    """
    with start_workers() as endpoints:
        ways = {"here": "here", "plain": "plain", "workers": ",".join(endpoints)}
        rounds: dict[str, list[Any]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                words = [sys.executable, __file__, str(args.model), "--inside", way]
                words += ["--tokens", str(args.tokens), "--prompt", str(args.prompt)]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                rounds[name].append(json.loads(done.stdout))
    first_results = {name: results[0] for name, results in rounds.items()}
    for name, results in rounds.items():
        rates = [
            statistics.median(result[figure] for result in results)
            for figure in ("prompt_per_second", "tokens_per_second")
        ]
        print(f"{title}: {name:8} prompt {rates[0]:8.1f} tok/s, tokens {rates[1]:8.1f} tok/s")
        first_results[name]["rates"] = rates
    same = first_results["workers"]["tokens"] == first_results["plain"]["tokens"]
    same_bits = first_results["workers"]["logits"] == first_results["plain"]["logits"]
    same_as_here = first_results["workers"]["tokens"] == first_results["here"]["tokens"]
    print(
        f"{title}: tokens as plain: {same}; logits to the bit: {same_bits}; tokens as here: {same_as_here}"
    )
    for baseline in ("plain", "here"):
        ratios = [
            a / b
            for a, b in zip(
                first_results["workers"]["rates"], first_results[baseline]["rates"], strict=True
            )
        ]
        print(f"{title}: speed against {baseline}: prompt {ratios[0]:.2f}, tokens {ratios[1]:.2f}")
    return same and same_bits


def kill_worker_under_load(args: argparse.Namespace) -> bool:
    """Kill and restart a worker of `serve --rpc` under load. Return whether no request was lost and
    no stream ended in an error event.
    """
    worker_stack = ExitStack()
    with worker_stack, ExitStack() as server_stack:
        endpoint = worker_stack.enter_context(worker("127.0.0.1", 52903))
        words = (
            "serve",
            str(args.model),
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
        process = server_stack.enter_context(
            subprocess.Popen(
                (sys.executable, "-m", "llmcli.app", *words), stdout=subprocess.PIPE, text=True
            )
        )
        server_stack.callback(process.terminate)
        assert process.stdout
        url = json.loads(process.stdout.readline())["url"]

        async def kill() -> None:
            print("killed the worker")
            worker_stack.close()
            worker_stack.enter_context(worker("127.0.0.1", 52903))

        counts = asyncio.run(load(url, 40, 4, 16, kill))
    nothing_lost = print_counts(counts) and not counts["told"]
    print(
        "the worker killed under load: no request was lost"
        if nothing_lost
        else "requests were LOST or broken"
    )
    return nothing_lost


def compute_one_way(args: argparse.Namespace) -> dict[str, Any]:
    """Compute the tokens by the way `args.inside`: "here", "plain", or over the workers at these
    comma-separated endpoints. Return the tokens, the sha256 of all logits, and the speeds.
    """
    from llmcli.hardware import rpc_workers
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from llmcli.runtime.binding.contexts.open_context import open_context
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.binding.rows.batch import BatchRows

    on_workers = args.inside not in ("here", "plain")
    if on_workers:
        rpc_workers.add_workers(rpc_workers.parse_endpoints(args.inside))
    options = ContextOptions(1024, 512, 512, 1, 1, 1, "q8_0", "q8_0", "on")
    layers = -1 if on_workers else 0
    with (
        open_model(args.model, ModelPlacement(layers, repack=args.inside == "here")) as model,
        open_context(model, options) as context,
    ):
        tokens = [(7 + 101 * index) % model.n_vocab for index in range(args.prompt)]
        with_logits = [False] * (args.prompt - 1) + [True]
        began = time.perf_counter()
        (row,) = context.decode(
            BatchRows(tokens, range(args.prompt), [0] * args.prompt, with_logits)
        )
        digest, new_tokens, prompt_end = (
            hashlib.sha256(row.logits.tobytes()),
            [int(row.logits.argmax())],
            time.perf_counter(),
        )
        for index in range(args.tokens - 1):
            (row,) = context.decode(BatchRows([new_tokens[-1]], [args.prompt + index], [0], [True]))
            digest.update(row.logits.tobytes())
            new_tokens.append(int(row.logits.argmax()))
        seconds = time.perf_counter() - prompt_end
    return {
        "tokens": new_tokens,
        "logits": digest.hexdigest(),
        "prompt_per_second": args.prompt / (prompt_end - began),
        "tokens_per_second": (args.tokens - 1) / seconds,
    }


@contextmanager
def loopback_workers() -> Iterator[list[str]]:
    """Start two workers on loopback; yield their endpoints."""
    with ExitStack() as stack:
        yield [stack.enter_context(worker("127.0.0.1", port)) for port in (52901, 52902)]


@contextmanager
def namespace_workers() -> Iterator[list[str]]:
    """Start two workers in network namespaces; yield their endpoints."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(worker_in_namespace(name, number))
            for number, name in enumerate(NAMES, 1)
        ]


@contextmanager
def worker_in_namespace(name: str, number: int) -> Iterator[str]:
    """Start a worker in a new network namespace behind a veth pair; yield its endpoint. `number`
    distinguishes the subnets. The namespace is deleted at the end.
    """
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
    """Run one command of iproute2. Raises CalledProcessError if it fails."""
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def worker(host: str, port: int, *prefix: str) -> Iterator[str]:
    """Start a worker, wait until it listens, and yield its endpoint; kill it at the end. `prefix`:
    a command that runs the worker, such as `ip netns exec NAME`.
    """
    words = (
        *prefix,
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
