#!/usr/bin/env python3
"""Measure the limits of the client in `llmcli bench load`: requests per second, chunks per second,
and the delay of its timestamps.

usage: .venv/bin/python scripts/benchmarks/load_client.py [--seconds 5] [--users 1,16,64,256]
       [--find-max URL ...]

A server in another process answers at once with prepared bytes. Three tests run with each number of
users:

    requests  answers of one token: requests per second
    chunks    answers of 512 tokens, sent as fast as the client reads: chunks per second
    clocks    answers of 64 tokens, one every 20 ms, each with the server's time of sending
              (CLOCK_MONOTONIC is the same in all processes): p50 and p99 of the delay of the
              client's timestamps, and the inter-token latency (ITL) that the client reports

The client's figures are valid for servers well below these limits. `--find-max URL` searches three
times for the largest concurrency of a server, and reports whether the results agree within one
step. A step is one level of the grid of concurrencies, or more if the searches report more noise.
Arguments after URL are passed on to `llmcli bench load`.
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
from llmcli.bench.load.client import LoadTarget, open_client
from llmcli.bench.load.generator import Load, LoadLength, LoadRun, generate_load
from llmcli.bench.load.metrics import compute_metrics
from llmcli.bench.load.records import LoadJob
from llmcli.http_client import sse
from llmcli.http_client.api_address import parse_base_url
from llmcli.runtime.requests.request import percentile

GAP = 0.020
PACED, LONG = 64, 512


def chunked(data: bytes) -> bytes:
    """Return `data` as one chunk of a chunked HTTP body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(document: object) -> bytes:
    """Return a server-sent event with the document as JSON, as one chunk."""
    return chunked(b"data: " + json.dumps(document).encode() + b"\n\n")


def token(**extra_fields: object) -> bytes:
    """Return the event of one token in the form of OpenAI's chat stream. `extra_fields` are added
    to its document.
    """
    fields = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "m",
    }
    return event(
        {
            **fields,
            "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
            **extra_fields,
        }
    )


def end(count: int) -> bytes:
    """Return the events after the last token: the finish reason, the usage with `count` completion
    tokens, and [DONE].
    """
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    usage = event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": count}})
    return last + usage + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SHORT = HEAD + token() + end(1)


class Instant(asyncio.Protocol):
    """An HTTP server that answers at once. The request's `max_tokens` selects the test: 1, PACED or
    LONG.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Prepare the state of one connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received = transport, b""
        self.writable, self.tasks = asyncio.Event(), set[asyncio.Task[None]]()
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the answers of this connection."""
        for task in self.tasks:
            task.cancel()

    def pause_writing(self) -> None:
        """Make `send_fast` wait, because the client reads more slowly than the server writes."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Let `send_fast` continue."""
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        """Collect the bytes, and answer the request when it is complete."""
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not separator or len(body) < length:
            return
        self.received = body[length:]
        if b'"max_tokens": 1,' in body:
            self.transport.write(SHORT)
        else:
            answer_coroutine = (
                self.send_paced() if b'"max_tokens": %d,' % PACED in body else self.send_fast()
            )
            task = asyncio.get_running_loop().create_task(answer_coroutine)
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def send_fast(self) -> None:
        """Send LONG tokens as fast as the client reads them."""
        token_bytes = token()
        self.transport.write(HEAD)
        for _ in range(LONG):
            self.transport.write(token_bytes)
            await asyncio.sleep(0)
            await self.writable.wait()
        self.transport.write(end(LONG))

    async def send_paced(self) -> None:
        """Send PACED tokens, one every GAP seconds, each with its time of sending."""
        self.transport.write(HEAD)
        due = time.perf_counter()
        for _ in range(PACED):
            self.transport.write(token(sent=time.perf_counter()))
            due += GAP
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self.transport.write(end(PACED))


def serve(listening: socket.socket, ready: Event) -> None:
    """Run the server on an open socket; set `ready` when it accepts connections. This is the main
    function of the server's process.
    """

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Instant, sock=listening)
        ready.set()
        await server.serve_forever()

    asyncio.run(run())


def jobs(count: int) -> Iterator[LoadJob]:
    """Yield, without end, a job whose prompt has 300 words and whose answer has `count` tokens."""
    return repeat(LoadJob("word " * 300, count))


async def measure(url: str, users: list[int], seconds: float) -> None:
    """Run the three tests with each number of users, each for `seconds`, and print."""
    # For each token of the test "clocks", the time of sending and the client's time of reading.
    sent: list[tuple[float, float]] = []
    read = sse.parse_event

    def parse_and_record(data: bytes) -> dict[str, object]:
        found = read(data)
        if "sent" in found:
            sent.append((float(found["sent"]), time.perf_counter()))
        return found

    sse.parse_event = parse_and_record  # type: ignore[assignment]
    length = LoadLength(None, seconds, 1)
    async with open_client(LoadTarget(parse_base_url(url), "m")) as client:
        for name, count in (("requests", 1), ("chunks", LONG), ("clocks", PACED)):
            for number in users:
                sent.clear()
                run = await generate_load(client.send, jobs(count), Load("closed", number), length)
                print_test(name, number, run, sent)


def print_test(name: str, users: int, run: LoadRun, sent: list[tuple[float, float]]) -> None:
    """Print the line of one test. `sent` has the server's and the client's time of each token, and
    is used by the test "clocks" only.
    """
    metrics = compute_metrics([run])
    assert not metrics.failed, metrics
    line = f"{name:8} {users:4} users: {metrics.request_rate:8.0f} requests/s {metrics.output_rate:8.0f} chunks/s, "
    line += f"{metrics.client_cpu:4.0%} of a CPU"
    if name == "clocks":
        delays_ms = [(ours - theirs) * 1e3 for theirs, ours in sent]
        itl = metrics.times["itl"].percentiles
        expected_rate = users * PACED / (PACED * GAP)
        line += f"; timestamps late by {percentile(delays_ms, 0.5):.2f} ms (p50) {percentile(delays_ms, 0.99):.2f} (p99)"
        line += f"; ITL {itl['p50']:.2f} p99 {itl['p99']:.2f} of {GAP * 1e3:.0f} ms sent; {expected_rate:.0f} chunks/s expected"
    elif metrics.client_cpu > 0:
        line += f"; alone on a core {metrics.request_rate / metrics.client_cpu:.0f} requests/s, "
        line += f"{metrics.output_rate / metrics.client_cpu:.0f} chunks/s"
    print(line, flush=True)


def agree(words: list[str], times: int = 3) -> bool:
    """Run `llmcli bench load --find-max` several times with the arguments `words`; return whether
    the largest levels that it finds are at most one step apart.
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
    levels_by_kind: dict[str, list[float | None]] = {}
    steps: dict[str, int] = {}
    for number in range(times):
        done = subprocess.run(
            [*command, "--seed", str(number + 1)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        for search in json.loads(done.stdout)["found"]:
            search_kind = search["find_max"]
            levels_by_kind.setdefault(search_kind, []).append(search["level"])
            steps[search_kind] = max(steps.get(search_kind, 1), search["steps"])
            details = ", ".join(
                f"{name} {search[name]}" for name in ("low", "high", "measured", "steps", "drift")
            )
            print(f"search {number + 1}: {search_kind} {search['level']} ({details})", flush=True)
    all_agree = True
    for search_kind, levels in levels_by_kind.items():
        grid = (
            level_search.user_levels()
            if search_kind == "concurrency"
            else level_search.rate_levels()
        )
        indexes = [-1 if level is None else grid.index(level) for level in levels]
        steps_apart = max(indexes) - min(indexes)
        all_agree = all_agree and steps_apart <= steps[search_kind]
        print(
            f"{search_kind}: {levels}: {steps_apart} levels apart, a step is {steps[search_kind]}",
            flush=True,
        )
    return all_agree


def main() -> int:
    """Parse the flags, and measure the client's limits or run three searches; return the exit
    code.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--users", default="1,16,64,256")
    parser.add_argument(
        "--find-max", nargs=argparse.REMAINDER, metavar="URL", help="and flags of bench load"
    )
    args = parser.parse_args()
    if args.find_max:
        extra_flags = ["--find-max", "concurrency"] if "--find-max" not in args.find_max else []
        return 0 if agree([*args.find_max, *extra_flags]) else 1
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ready = multiprocessing.Event()
    server = multiprocessing.Process(target=serve, args=(listening, ready), daemon=True)
    server.start()
    ready.wait()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        asyncio.run(measure(url, [int(count) for count in args.users.split(",")], args.seconds))
    finally:
        server.terminate()
        server.join()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
