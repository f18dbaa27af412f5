#!/usr/bin/env python3
"""What the client of `llmcli bench load` can take itself: requests and chunks a second, and the
error of its clocks.

usage: .venv/bin/python scripts/benchmarks/load_client.py [--seconds 5] [--users 1,16,64,256]
[--find-max URL ...]

A server of this script's own, in another process, answers at once: bytes made beforehand, written
without looking at the request. Three tests, each for some numbers of users:
  requests  answers of one token: requests a second chunks    answers of 512 tokens, as fast as they
  are read: chunks a second clocks    answers of 64 tokens, one every 20 ms, each with the server's
  own time in it (CLOCK_MONOTONIC is one for all
            processes of a machine): what the client's stamps add, p50 and p99, and TTFT and ITL
            against what was sent
The client's figures are good for servers well below these. `--find-max URL` searches three times
for the largest concurrency on a server and tells whether the three agree within one step (one level
of the grid, or the more that the searches said their noise allows); what follows URL is passed on.
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

from llmcli.bench.load import level_search, sse
from llmcli.bench.load.client import Server, base, opened
from llmcli.bench.load.generator import Length, Load, Run, drive
from llmcli.bench.load.metrics import figures
from llmcli.bench.load.records import Job
from llmcli.runtime.requests.request import percentile

GAP = 0.020
PACED, LONG = 64, 512


def chunked(data: bytes) -> bytes:
    """One piece of a body whose length is not told."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(document: object) -> bytes:
    """A chunk of a stream."""
    return chunked(b"data: " + json.dumps(document).encode() + b"\n\n")


def token(**more: object) -> bytes:
    """One token, as llama-server and others send it."""
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
    """What follows the last token."""
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    usage = event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": count}})
    return last + usage + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SHORT = HEAD + token() + end(1)


class Instant(asyncio.Protocol):
    """Answers when the last byte of a request is there; `max_tokens` says which of the three tests
    it is.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.got = transport, b""
        self.free, self.work = asyncio.Event(), set[asyncio.Task[None]]()
        self.free.set()

    def connection_lost(self, error: Exception | None) -> None:
        """It has gone: nobody reads what would be written."""
        for task in self.work:
            task.cancel()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self.free.clear()

    def resume_writing(self) -> None:
        """It has read."""
        self.free.set()

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole."""
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
        """Tokens one by one, as fast as they are read."""
        piece = token()
        self.transport.write(HEAD)
        for _ in range(LONG):
            self.transport.write(piece)
            await asyncio.sleep(0)
            await self.free.wait()
        self.transport.write(end(LONG))

    async def paced(self) -> None:
        """Tokens at their times, with the time of sending in each."""
        self.transport.write(HEAD)
        due = time.perf_counter()
        for _ in range(PACED):
            self.transport.write(token(sent=time.perf_counter()))
            due += GAP
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self.transport.write(end(PACED))


def serve(listening: socket.socket, ready: Event) -> None:
    """The server's process."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Instant, sock=listening)
        ready.set()
        await server.serve_forever()

    asyncio.run(run())


def jobs(count: int) -> Iterator[Job]:
    """The same question again and again, some 300 words long."""
    return repeat(Job("word " * 300, count))


async def measure(url: str, users: list[int], seconds: float) -> None:
    """The three tests."""
    sent: list[
        tuple[float, float]
    ] = []  # the server's time and ours, of each token of the paced test
    read = sse.parsed

    def noted(data: bytes) -> dict[str, object]:
        found = read(data)
        if "sent" in found:
            sent.append((float(found["sent"]), time.perf_counter()))
        return found

    sse.parsed = noted  # type: ignore[assignment]
    length = Length(None, seconds, 1)
    async with opened(Server(base(url), "m")) as client:
        for name, count in (("requests", 1), ("chunks", LONG), ("clocks", PACED)):
            for number in users:
                sent.clear()
                run = await drive(client.ask, jobs(count), Load("closed", number), length)
                tell(name, number, run, sent)


def tell(name: str, users: int, run: Run, sent: list[tuple[float, float]]) -> None:
    """One line of a test."""
    told = figures([run])
    assert not told.failed, told
    line = f"{name:8} {users:4} users: {told.request_rate:8.0f} requests/s {told.output_rate:8.0f} chunks/s, "
    line += f"{told.client:4.0%} of a CPU"
    if name == "clocks":
        off = [(ours - theirs) * 1e3 for theirs, ours in sent]
        itl = told.times["itl"].ranks
        asked = users * PACED / (PACED * GAP)
        line += f"; stamps late by {percentile(off, 0.5):.2f} ms (p50) {percentile(off, 0.99):.2f} (p99)"
        line += f"; ITL {itl['p50']:.2f} p99 {itl['p99']:.2f} of {GAP * 1e3:.0f} ms sent; {asked:.0f} chunks/s were due"
    elif told.client > 0:
        line += f"; alone on a core {told.request_rate / told.client:.0f} requests/s, "
        line += f"{told.output_rate / told.client:.0f} chunks/s"
    print(line, flush=True)


def agree(words: list[str], times: int = 3) -> bool:
    """Search several times on one server; whether the largest levels are neighbours in the grid."""
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
        grid = level_search.users() if kind == "concurrency" else level_search.rates()
        places = [-1 if level is None else grid.index(level) for level in levels]
        apart = max(places) - min(places)
        good = good and apart <= steps[kind]
        print(f"{kind}: {levels}: {apart} levels apart, a step is {steps[kind]}", flush=True)
    return good


def main() -> int:
    """The client's own limits; or three searches."""
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
