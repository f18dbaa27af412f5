#!/usr/bin/env python3
"""Compare `llmcli serve` with llama-server: the same model, flags, prompts and users, in turn.

usage: .venv/bin/python scripts/benchmarks/llama_server.py MODEL.gguf LLAMA_SERVER
       [--users 1,2,4,8,16] [--prompts 32,512] [--shared 0,0.9] [--gen 96] [--threads N] [--turns 6]
       [--rounds 2] [--least 18] [--completions] [--ours '…'] [--theirs '…'] [-o FILE.jsonl]
       [--skip-full] [--only-full]

Both servers run all the time, and only one of them gets requests. A turn of a cell (users, prompt,
shared part) is a closed loop of `rounds` requests per user, at least `least`, with new prompts that
both servers get; a fair coin decides the order. For each cell the script prints the output tokens
per second of both, their ratio (ours / theirs) with its 95 % interval, TTFT p50 and p99 with
ratios, failures, CPU milliseconds per token of each process (which other programs disturb less than
wall time), and the share of the prompts that was cached. A p99 needs 100 requests (turns times
requests per turn). Goals: tokens per second >= 1.0 everywhere and >= 1.15 at 4 and 8 users, p99
TTFT <= 1.0.

The last test is a full cache: a pool for about three of eight users. The goal is 0 failed requests.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmcli.bench.load import session
from llmcli.bench.load.ab_comparison import ServerComparison, compare_runs
from llmcli.bench.load.client import LoadTarget, parse_base_url
from llmcli.bench.load.generator import Load, LoadLength, LoadRun
from llmcli.bench.load.local_server import stop_process
from llmcli.bench.load.mixes import RequestLengths
from llmcli.bench.load.session import PromptShape, ServerSession
from llmcli.errors import UserError
from llmcli.hardware import host

TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 180.0  # seconds for a request
GREEDY = {"temperature": 0, "ignore_eos": True, "cache_prompt": True}


@dataclass(slots=True)
class Side:
    """A running server: its address, its process, and the CPU seconds of its turns."""

    name: str
    url: str
    process: "subprocess.Popen[bytes]"
    cpu: float = 0.0
    runs: list[LoadRun] = field(default_factory=list)

    def spent(self) -> float:
        """Return the CPU seconds of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def running(name: str, command: list[str], port: int, log: Path) -> Iterator[Side]:
    """Run a server; yield once it answers."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as words:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
        try:
            while not ready(url):
                if process.poll() is not None:
                    raise SystemExit(
                        f"{name} did not start: {shlex.join(command)}\n{log.read_text()[-2000:]}"
                    )
                time.sleep(0.2)
            yield Side(name, url, process)
        finally:
            stop_process(process)


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ready(url: str) -> bool:
    """Return whether the server answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def both(given: argparse.Namespace, slots: int, cells: int) -> Iterator[tuple[Side, Side]]:
    """Run both servers with the same model, threads, slots and pool."""
    same = ["-c", str(cells), "-np", str(slots), "-t", str(given.threads)]
    ports = free_port(), free_port()
    ours = [
        sys.executable,
        "-m",
        "llmcli.app",
        "serve",
        given.model,
        "--port",
        str(ports[0]),
        *same,
    ]
    theirs = [
        given.llama_server,
        "-m",
        given.model,
        "--port",
        str(ports[1]),
        *same,
        "--kv-unified",
        "--no-webui",
    ]
    with ExitStack() as stack:
        folder = Path(given.logs)
        folder.mkdir(parents=True, exist_ok=True)
        commands = (
            ("theirs", [*theirs, *shlex.split(given.theirs)]),
            ("ours", [*ours, *shlex.split(given.ours)]),
        )
        two = [
            stack.enter_context(running(name, command, port, folder / f"{name}.log"))
            for (name, command), port in zip(commands, reversed(ports), strict=True)
        ]
        yield two[0], two[1]


def _server(side: Side, given: argparse.Namespace) -> LoadTarget:
    return LoadTarget(
        parse_base_url(side.url),
        extra_fields=GREEDY,
        timeout_seconds=PATIENCE,
        chat=not given.completions,
    )


async def turns(
    sides: Sequence[Side],
    open_: Sequence[ServerSession],
    load: Load,
    length: LoadLength,
    count: int,
    number: int,
) -> None:
    """Run `count` turns of each side."""
    coin = random.Random(number)
    for side in sides:
        side.runs, side.cpu = [], 0.0
    for turn in range(count):
        for at in (0, 1) if coin.random() < 0.5 else (1, 0):
            before = sides[at].spent()
            sides[at].runs.append(await open_[at].run_load(load, length, number + turn))
            sides[at].cpu += sides[at].spent() - before


async def cell(
    sides: tuple[Side, Side],
    shape: RequestLengths,
    users: int,
    given: argparse.Namespace,
    number: int,
) -> ServerComparison:
    """Measure one cell of the table."""
    asked = PromptShape("fixed", shape, number)
    async with AsyncExitStack() as stack:
        open_ = [
            await stack.enter_async_context(session.open_session(_server(side, given), asked))
            for side in sides
        ]
        length = LoadLength(max(given.least, given.rounds * users), warmup=users)
        await turns(sides, open_, Load("closed", users), length, given.turns, 1)
    return compare_runs(sides[0].runs, sides[1].runs)


def told(
    sides: tuple[Side, Side], found: ServerComparison, shape: RequestLengths, users: int
) -> dict[str, object]:
    """Return a cell as a row; A is theirs, B ours."""
    ratios = {one.name: one for one in found.ratios}
    row: dict[str, object] = {
        "users": users,
        "prompt": shape.prompt_tokens,
        "shared": shape.shared_fraction,
        "gen": shape.output_tokens,
    }
    for name in ("output tok/s", "ttft p50", "ttft p99", "tpot p50", "itl p99"):
        one = ratios.get(name)
        row[name] = (
            None
            if one is None
            else {
                "theirs": one.a,
                "ours": one.b,
                "ratio": one.ratio,
                "low": one.low,
                "high": one.high,
            }
        )
    for side, figures in zip(sides, (found.a, found.b), strict=True):
        tokens = figures.output_rate * figures.seconds
        row[f"{side.name} failed"] = figures.failed
        row[f"{side.name} cached"] = figures.cached_share
        row[f"{side.name} cpu ms a token"] = side.cpu * 1e3 / max(1.0, tokens)
        row[f"{side.name} answered"] = figures.answered
    return row


def line(row: dict[str, object]) -> str:
    """Return a cell as text."""

    def pair(name: str) -> str:
        one = row[name]
        if not isinstance(one, dict):
            return "-"
        span = "" if one["low"] is None else f" ({one['low']:.2f}-{one['high']:.2f})"
        return f"{one['ours']:.1f}/{one['theirs']:.1f} = {one['ratio']:.3f}{span}"

    failed = [sum(dict(row[f"{name} failed"]).values()) for name in ("ours", "theirs")]  # type: ignore[call-overload]
    cached = [row[f"{name} cached"] for name in ("ours", "theirs")]
    share = "/".join("?" if one is None else f"{one:.0%}" for one in cached)
    cpu = "/".join(f"{row[f'{name} cpu ms a token']:.1f}" for name in ("ours", "theirs"))
    return (
        f"{row['users']:>3} users p{row['prompt']} shared {row['shared']}: tok/s {pair('output tok/s')}; "
        f"TTFT p50 {pair('ttft p50')}, p99 {pair('ttft p99')}; failed {failed[0]}/{failed[1]}; "
        f"cpu ms/token {cpu}; cached {share}"
    )


async def full(sides: tuple[Side, Side], given: argparse.Namespace) -> list[str]:
    """Serve eight users where three fit; return the outcome of each server."""
    lines, shape = [], RequestLengths(128, 96)
    for side in sides:
        async with session.open_session(
            _server(side, given), PromptShape("fixed", shape, 7)
        ) as one:
            try:
                run = await one.run_load(Load("closed", 8), LoadLength(24, warmup=0), 1)
            except UserError as error:
                lines.append(f"{side.name}: {error}")
                continue
        kinds: dict[str, int] = {}
        for answer in run.measured_answers:
            kinds[answer.error or "answered"] = kinds.get(answer.error or "answered", 0) + 1
        says = {answer.error_message for answer in run.measured_answers if answer.error_message}
        lines.append(
            f"{side.name}: {kinds} {sorted(says)[:2]}; process {side.process.poll() or 'runs'}"
        )
    return lines


def numbers(text: str) -> list[float]:
    """Parse comma-separated numbers."""
    return [float(one) for one in text.split(",")]


def main() -> int:
    """Measure all cells, then the full cache."""
    # so that the servers end with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("llama_server")
    parser.add_argument("--users", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=numbers, default=[32, 512])
    parser.add_argument("--shared", type=numbers, default=[0.0, 0.9])
    parser.add_argument("--gen", type=int, default=96)
    parser.add_argument("--threads", type=int, default=host.core_count())
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--least", type=int, default=18)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--ctx", type=int, default=16384)
    parser.add_argument("--ours", default="", help="more flags of llmcli serve")
    parser.add_argument("--theirs", default="", help="more flags of llama-server")
    parser.add_argument("--logs", default="/tmp/compare_servers")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument(
        "--completions", action="store_true", help="/v1/completions: for models without a template"
    )
    parser.add_argument("--skip-full", action="store_true")
    parser.add_argument("--only-full", action="store_true")
    given = parser.parse_args()
    if not given.only_full:
        with both(given, given.slots, given.ctx) as sides:
            number = 1
            for prompt in given.prompts:
                for shared in given.shared:
                    for users in given.users:
                        shape = RequestLengths(int(prompt), given.gen, shared)
                        found = asyncio.run(cell(sides, shape, int(users), given, number))
                        row = told(sides, found, shape, int(users))
                        number += 1
                        print(line(row), flush=True)
                        if given.output:
                            with given.output.open("a") as out:
                                out.write(json.dumps(row) + "\n")
    if not given.skip_full:
        with both(given, 8, 768) as sides:
            print("full cache, 8 users of 128 + 96 tokens in 768 cells:")
            print("\n".join(asyncio.run(full(sides, given))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
