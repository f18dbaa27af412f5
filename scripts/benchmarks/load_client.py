#!/usr/bin/env python3
"""Measure the limits of the client of `llmcli bench load`: requests and chunks per second, clock
errors.

usage: .venv/bin/python scripts/benchmarks/load_client.py [--seconds 5] [--users 1,16,64,256]
       [--find-max URL ...]

A server in another process answers at once with prepared bytes. Three tests run with each number of
users:

    requests  answers of one token: requests per second
    chunks    answers of 512 tokens, as fast as they are read: chunks per second
    clocks    answers of 64 tokens, one every 20 ms, with the server's timestamps (CLOCK_MONOTONIC
    is
              the same in all processes): delay of the client's timestamps, p50 and p99, and TTFT
              and
              ITL against what was sent

The client's figures are valid for servers well below these limits. `--find-max URL` searches three
times for the largest concurrency of a server. It reports whether the results agree within one step:
one level of the grid, or more if the searches report more noise. Arguments after URL are passed on.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from multiprocessing.synchronize import Event

from llmcli.bench.load import level_search
from llmcli.bench.load.client import LoadTarget, open_client, parse_base_url
from llmcli.bench.load.generator import Load, LoadLength, LoadRun, generate_load
from llmcli.bench.load.metrics import compute_metrics
from llmcli.bench.load.records import LoadJob
from llmcli.http_client import sse
from llmcli.runtime.requests.request import percentile

GAP = 0.020
PACED, LONG = 64, 512


def chunked(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(document: object) -> bytes:
    """Return a stream event."""
    return chunked(b"data: " + json.dumps(document).encode() + b"\n\n")


def token(**more: object) -> bytes:
    """Return the event of one token, as llama-server and others send it."""
    about = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "m",
    }
    return event(
        {
            **about,
            "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
            **more,
        }
    )


def end(count: int) -> bytes:
    """Return the events after the last token."""
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    usage = event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": count}})
    return last + usage + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SHORT = HEAD + token() + end(1)


class Instant(asyncio.Protocol):
    """A server protocol that answers at once; `max_tokens` of the request selects the test."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start a connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.got = transport, b""
        self.free, self.work = asyncio.Event(), set[asyncio.Task[None]]()
        self.free.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Stop writing."""
        for task in self.work:
            task.cancel()

    def pause_writing(self) -> None:
        """Wait: the client reads more slowly than the server writes."""
        self.free.clear()

    def resume_writing(self) -> None:
        """Resume writing."""
        self.free.set()

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self.got += data
        head, found, rest = self.got.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return
        self.got = rest[length:]
        if b'"max_tokens": 1,' in rest:
            self.transport.write(SHORT)
        else:
            work = self.paced() if b'"max_tokens": %d,' % PACED in rest else self.long()
            task = asyncio.get_running_loop().create_task(work)
            self.work.add(task)
            task.add_done_callback(self.work.discard)

    async def long(self) -> None:
        """Send tokens as fast as they are read."""
        piece = token()
        self.transport.write(HEAD)
        for _ in range(LONG):
            self.transport.write(piece)
            await asyncio.sleep(0)
            await self.free.wait()
        self.transport.write(end(LONG))

    async def paced(self) -> None:
        """Send tokens at fixed times, each with its time of sending."""
        self.transport.write(HEAD)
        due = time.perf_counter()
        for _ in range(PACED):
            self.transport.write(token(sent=time.perf_counter()))
            due += GAP
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self.transport.write(end(PACED))


def serve(listening: socket.socket, ready: Event) -> None:
    """Run the server's process."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Instant, sock=listening)
        ready.set()
        await server.serve_forever()

    asyncio.run(run())


def jobs(count: int) -> Iterator[LoadJob]:
    """Yield the same question of about 300 words `count` times."""
    return repeat(LoadJob("word " * 300, count))


async def measure(url: str, users: list[int], seconds: float) -> None:
    """Run the three tests."""
    sent: list[
        tuple[float, float]
    ] = []  # times of the server and the client for each token of the paced test
    read = sse.parse_event

    def noted(data: bytes) -> dict[str, object]:
        found = read(data)
        if "sent" in found:
            sent.append((float(found["sent"]), time.perf_counter()))
        return found

    sse.parse_event = noted  # type: ignore[assignment]
    length = LoadLength(None, seconds, 1)
    async with open_client(LoadTarget(parse_base_url(url), "m")) as client:
        for name, count in (("requests", 1), ("chunks", LONG), ("clocks", PACED)):
            for number in users:
                sent.clear()
                run = await generate_load(client.send, jobs(count), Load("closed", number), length)
                tell(name, number, run, sent)


def tell(name: str, users: int, run: LoadRun, sent: list[tuple[float, float]]) -> None:
    """Print one line of a test."""
    told = compute_metrics([run])
    assert not told.failed, told
    line = f"{name:8} {users:4} users: {told.request_rate:8.0f} requests/s {told.output_rate:8.0f} chunks/s, "
    line += f"{told.client_cpu:4.0%} of a CPU"
    if name == "clocks":
        off = [(ours - theirs) * 1e3 for theirs, ours in sent]
        itl = told.times["itl"].percentiles
        asked = users * PACED / (PACED * GAP)
        line += f"; timestamps late by {percentile(off, 0.5):.2f} ms (p50) {percentile(off, 0.99):.2f} (p99)"
        line += f"; ITL {itl['p50']:.2f} p99 {itl['p99']:.2f} of {GAP * 1e3:.0f} ms sent; {asked:.0f} chunks/s expected"
    elif told.client_cpu > 0:
        line += f"; alone on a core {told.request_rate / told.client_cpu:.0f} requests/s, "
        line += f"{told.output_rate / told.client_cpu:.0f} chunks/s"
    print(line, flush=True)


def agree(words: list[str], times: int = 3) -> bool:
    """Search several times on one server; return whether the largest levels are neighbors in the
    grid.
    """
    command = [
        sys.executable,
        "-m",
        "llmcli.app",
        "bench",
        "load",
        *words,
        "--json",
        "--no-history",
    ]
    found: dict[str, list[float | None]] = {}
    steps: dict[str, int] = {}
    for number in range(times):
        done = subprocess.run(
            [*command, "--seed", str(number + 1)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        for one in json.loads(done.stdout)["found"]:
            kind = one["find_max"]
            found.setdefault(kind, []).append(one["level"])
            steps[kind] = max(steps.get(kind, 1), one["steps"])
            told = ", ".join(
                f"{name} {one[name]}" for name in ("low", "high", "measured", "steps", "drift")
            )
            print(f"search {number + 1}: {kind} {one['level']} ({told})", flush=True)
    good = True
    for kind, levels in found.items():
        grid = level_search.user_levels() if kind == "concurrency" else level_search.rate_levels()
        places = [-1 if level is None else grid.index(level) for level in levels]
        apart = max(places) - min(places)
        good = good and apart <= steps[kind]
        print(f"{kind}: {levels}: {apart} levels apart, a step is {steps[kind]}", flush=True)
    return good


def main() -> int:
    """Measure the client's limits, or run three searches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--users", default="1,16,64,256")
    parser.add_argument(
        "--find-max", nargs=argparse.REMAINDER, metavar="URL", help="and flags of bench load"
    )
    given = parser.parse_args()
    if given.find_max:
        wanted = ["--find-max", "concurrency"] if "--find-max" not in given.find_max else []
        return 0 if agree([*given.find_max, *wanted]) else 1
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ready = multiprocessing.Event()
    server = multiprocessing.Process(target=serve, args=(listening, ready), daemon=True)
    server.start()
    ready.wait()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        asyncio.run(measure(url, [int(one) for one in given.users.split(",")], given.seconds))
    finally:
        server.terminate()
        server.join()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
