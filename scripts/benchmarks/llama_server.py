#!/usr/bin/env python3
"""Compare `llmcli serve` with llama-server under the same load, in turn.

usage: .venv/bin/python scripts/benchmarks/llama_server.py MODEL.gguf LLAMA_SERVER
       [--users 1,2,4,8,16] [--prompts 32,512] [--shared 0,0.9] [--gen 96] [--threads N] [--turns 6]
       [--rounds 2] [--least 18] [--completions] [--ours '…'] [--theirs '…'] [-o FILE.jsonl]
       [--skip-full] [--only-full]

Both servers run all the time with the same model and flags, and only one of them gets requests at a
time. The script measures every combination of users (--users), prompt length (--prompts) and shared
share of the prompts (--shared). In one turn of a combination, each user sends --rounds requests one
after the other, and all users together at least --least. Both servers get the same new prompts; a
fair coin decides which is first. For each combination the script prints the output tokens per
second of both, their ratio (ours / theirs) with its 95 % interval, p50 and p99 of the time to first
token (TTFT) with ratios, failures, CPU milliseconds per token of each process (which other programs
disturb less than wall time), and the share of the prompts that was cached. A p99 needs 100 requests
(turns times requests per turn). Goals: the ratio of tokens per second is >= 1.0 everywhere and >=
1.15 at 4 and 8 users; the ratio of p99 TTFT is <= 1.0.

The last test is a full cache: eight users share a KV pool that is large enough for about three. The
goal is 0 failed requests.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
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
from llmcli.bench.load.client import LoadTarget
from llmcli.bench.load.generator import Load, LoadLength, LoadRun
from llmcli.bench.load.local_server import stop_process
from llmcli.bench.load.mixes import RequestLengths
from llmcli.bench.load.session import PromptShape, ServerSession
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.http_client.api_address import parse_base_url
from scripts.load.server_process import free_port

TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 180.0  # seconds for a request
GREEDY = {"temperature": 0, "ignore_eos": True, "cache_prompt": True}


@dataclass(slots=True)
class Side:
    """A running server. `runs` and `cpu` (seconds) belong to the combination being measured."""

    name: str
    url: str
    process: "subprocess.Popen[bytes]"
    cpu: float = 0.0
    runs: list[LoadRun] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds, user and system, that the process has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def run_server(name: str, command: list[str], port: int, log: Path) -> Iterator[Side]:
    """Start a server and wait until it answers; stop it at the end. Its output goes to `log`.
    Raises SystemExit if it ends before it answers.
    """
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file
        )
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


def ready(url: str) -> bool:
    """Return whether /health answers with status 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def both(args: argparse.Namespace, slots: int, cells: int) -> Iterator[tuple[Side, Side]]:
    """Run both servers with the same model, threads, `slots` and a pool of `cells`. Yields
    llama-server first, then `llmcli serve`.
    """
    shared_flags = ["-c", str(cells), "-np", str(slots), "-t", str(args.threads)]
    ports = free_port(), free_port()
    ours = [
        sys.executable,
        "-m",
        "llmcli.app",
        "serve",
        args.model,
        "--port",
        str(ports[0]),
        *shared_flags,
    ]
    theirs = [
        args.llama_server,
        "-m",
        args.model,
        "--port",
        str(ports[1]),
        *shared_flags,
        "--kv-unified",
        "--no-webui",
    ]
    with ExitStack() as stack:
        folder = Path(args.logs)
        folder.mkdir(parents=True, exist_ok=True)
        commands = (
            ("theirs", [*theirs, *shlex.split(args.theirs)]),
            ("ours", [*ours, *shlex.split(args.ours)]),
        )
        sides = [
            stack.enter_context(run_server(name, command, port, folder / f"{name}.log"))
            for (name, command), port in zip(commands, reversed(ports), strict=True)
        ]
        yield sides[0], sides[1]


def _server(side: Side, args: argparse.Namespace) -> LoadTarget:
    return LoadTarget(
        parse_base_url(side.url),
        extra_fields=GREEDY,
        timeout_seconds=PATIENCE,
        chat=not args.completions,
    )


async def turns(
    sides: Sequence[Side],
    sessions: Sequence[ServerSession],
    load: Load,
    length: LoadLength,
    count: int,
    number: int,
) -> None:
    """Run `count` turns of each side, and store the results in the sides. `number` seeds the order
    and the prompts.
    """
    coin = random.Random(number)
    for side in sides:
        side.runs, side.cpu = [], 0.0
    for turn in range(count):
        for index in (0, 1) if coin.random() < 0.5 else (1, 0):
            before = sides[index].cpu_seconds()
            sides[index].runs.append(await sessions[index].run_load(load, length, number + turn))
            sides[index].cpu += sides[index].cpu_seconds() - before


async def cell(
    sides: tuple[Side, Side],
    shape: RequestLengths,
    users: int,
    args: argparse.Namespace,
    number: int,
) -> ServerComparison:
    """Measure one combination of prompt shape and number of users."""
    prompts = PromptShape("fixed", shape, number)
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(session.open_session(_server(side, args), prompts))
            for side in sides
        ]
        length = LoadLength(max(args.least, args.rounds * users), warmup=users)
        await turns(sides, sessions, Load("closed", users), length, args.turns, 1)
    return compare_runs(sides[0].runs, sides[1].runs)


def table_row(
    sides: tuple[Side, Side], found: ServerComparison, shape: RequestLengths, users: int
) -> dict[str, object]:
    """Return the results of one combination as a JSON object. In `found`, A is llama-server and B
    is `llmcli serve`.
    """
    ratios = {ratio.name: ratio for ratio in found.ratios}
    row: dict[str, object] = {
        "users": users,
        "prompt": shape.prompt_tokens,
        "shared": shape.shared_fraction,
        "gen": shape.output_tokens,
    }
    for name in ("output tok/s", "ttft p50", "ttft p99", "tpot p50", "itl p99"):
        ratio = ratios.get(name)
        row[name] = (
            None
            if ratio is None
            else {
                "theirs": ratio.a,
                "ours": ratio.b,
                "ratio": ratio.ratio,
                "low": ratio.low,
                "high": ratio.high,
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
    """Return the results of one combination as a line of text."""

    def pair(name: str) -> str:
        figures = row[name]
        if not isinstance(figures, dict):
            return "-"
        span = "" if figures["low"] is None else f" ({figures['low']:.2f}-{figures['high']:.2f})"
        return f"{figures['ours']:.1f}/{figures['theirs']:.1f} = {figures['ratio']:.3f}{span}"

    failed = [sum(dict(row[f"{name} failed"]).values()) for name in ("ours", "theirs")]  # type: ignore[call-overload]
    cached = [row[f"{name} cached"] for name in ("ours", "theirs")]
    share = "/".join("?" if figures is None else f"{figures:.0%}" for figures in cached)
    cpu = "/".join(f"{row[f'{name} cpu ms a token']:.1f}" for name in ("ours", "theirs"))
    return (
        f"{row['users']:>3} users p{row['prompt']} shared {row['shared']}: tok/s {pair('output tok/s')}; "
        f"TTFT p50 {pair('ttft p50')}, p99 {pair('ttft p99')}; failed {failed[0]}/{failed[1]}; "
        f"cpu ms/token {cpu}; cached {share}"
    )


async def full(sides: tuple[Side, Side], args: argparse.Namespace) -> list[str]:
    """Send requests of eight users to servers whose cache fits three; return a line for each server
    with the number of answers and of each error.
    """
    lines, shape = [], RequestLengths(128, 96)
    for side in sides:
        async with session.open_session(
            _server(side, args), PromptShape("fixed", shape, 7)
        ) as open_session:
            try:
                run = await open_session.run_load(Load("closed", 8), LoadLength(24, warmup=0), 1)
            except UserError as error:
                lines.append(f"{side.name}: {error}")
                continue
        outcomes: dict[str, int] = {}
        for answer in run.measured_answers:
            outcomes[answer.error or "answered"] = outcomes.get(answer.error or "answered", 0) + 1
        messages = {answer.error_message for answer in run.measured_answers if answer.error_message}
        lines.append(
            f"{side.name}: {outcomes} {sorted(messages)[:2]}; process {side.process.poll() or 'runs'}"
        )
    return lines


def parse_numbers(text: str) -> list[float]:
    """Parse comma-separated numbers, such as "1,2.5"."""
    return [float(number) for number in text.split(",")]


def main() -> int:
    """Parse the flags, measure all combinations, then the full cache; return the exit code."""
    # Turn SIGTERM into SystemExit, so that the context managers stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("llama_server")
    parser.add_argument("--users", type=parse_numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=parse_numbers, default=[32, 512])
    parser.add_argument("--shared", type=parse_numbers, default=[0.0, 0.9])
    parser.add_argument("--gen", type=int, default=96)
    parser.add_argument("-t", "--threads", type=int, default=host.core_count())
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
    args = parser.parse_args()
    if not args.only_full:
        with both(args, args.slots, args.ctx) as sides:
            number = 1
            for prompt in args.prompts:
                for shared in args.shared:
                    for users in args.users:
                        shape = RequestLengths(int(prompt), args.gen, shared)
                        found = asyncio.run(cell(sides, shape, int(users), args, number))
                        row = table_row(sides, found, shape, int(users))
                        number += 1
                        print(line(row), flush=True)
                        if args.output:
                            with args.output.open("a") as out:
                                out.write(json.dumps(row) + "\n")
    if not args.skip_full:
        with both(args, 8, 768) as sides:
            print("full cache, 8 users of 128 + 96 tokens in 768 cells:")
            print("\n".join(asyncio.run(full(sides, args))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
