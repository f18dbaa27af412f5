#!/usr/bin/env python3
"""Measure how fast a server answers one client while many other clients are idle or slow.

usage: .venv/bin/python scripts/load/slow_clients.py FILE.gguf [--idle 1000] [--slow 200]
       [--large 50] [--pipelined 1000] [--requests 40] [-- FLAGS of serve]

One client first sends requests alone, then while other connections are open: `--idle` silent ones,
`--slow` ones that send a byte per second, `--large` ones that have sent all but the end of a body
of eight million bytes, and one that has sent `--pipelined` requests at the same time and reads the
answers in turn. The script prints the client's times and the server's memory. It exits with 1 if a
request of the client fails, if a pipelined answer is missing or out of order, or if a sequence is
still running at the end.
"""

import argparse
import asyncio
import resource
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx2

from scripts.fuzz.http_requests import run_server, wait_until_idle

TEXT = "/v1/completions"
BODY = b'{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}'
SIZE = 8_000_000
Writer = asyncio.StreamWriter


def head(size: int, extra_headers: str = "") -> bytes:
    """Return the head of a completion request whose body has `size` bytes."""
    return f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n{extra_headers}\r\n".encode()


async def send_slowly(writer: Writer) -> None:
    """Send a request whose body has one byte per second."""
    with suppress(OSError):
        writer.write(head(len(BODY)))
        for byte in BODY:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1)


async def send_unfinished(writer: Writer) -> None:
    """Send a request of SIZE bytes without its last part."""
    with suppress(OSError):
        writer.write(head(SIZE))
        for _ in range(SIZE // 100_000 - 1):
            writer.write(b" " * 100_000)
            await writer.drain()


async def send_pipelined(port: int, count: int) -> list[str]:
    """Send `count` requests on one connection without waiting for answers. Return a message for
    each answer with a wrong status.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    requests = [(head(len(BODY)) + BODY, 200), *[(health, 200), (head(1) + b"{", 400)] * 10]
    writer.write(b"".join(requests[number % len(requests)][0] for number in range(count)))
    failures = []
    for number in range(count):
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        if int(lines[0].split()[1]) != requests[number % len(requests)][1]:
            failures.append(f"pipelined request {number}: {lines[0].decode()}")
        size = next(
            int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(size)
    writer.close()
    return failures


async def time_answers(client: httpx2.AsyncClient, count: int) -> list[float]:
    """Send `count` requests one after another, and return the milliseconds of each answer."""
    milliseconds = []
    for _ in range(count):
        began = time.perf_counter()
        (
            await client.post(TEXT, content=BODY, headers={"content-type": "application/json"})
        ).raise_for_status()
        milliseconds.append((time.perf_counter() - began) * 1e3)
    return milliseconds


async def measure(url: str, args: argparse.Namespace) -> list[str]:
    """Measure the client alone and while the other connections are open, and print the times.
    Return the failures, including sequences that still run after all have disconnected.
    """
    port, failures = int(url.rpartition(":")[2]), list[str]()
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        alone = await time_answers(client, args.requests)
        before = await memory(client)
        counts = args.idle + args.slow + args.large
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(counts)]
        writers = [writer for _, writer in connections]
        tasks = [
            asyncio.create_task(send_slowly(writer))
            for writer in writers[args.idle : args.idle + args.slow]
        ]
        tasks += [
            asyncio.create_task(send_unfinished(writer))
            for writer in writers[args.idle + args.slow :]
        ]
        pipe = asyncio.create_task(send_pipelined(port, args.pipelined))
        crowded = await time_answers(client, args.requests)
        memory_crowded = await memory(client)
        failures += await pipe
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.transport.abort()  # close() would first send data that is never read
        failures += await wait_until_idle(client)
        print_times("alone", alone, before)
        print_times(f"beside {counts} connections", crowded, memory_crowded)
    return failures


async def memory(client: httpx2.AsyncClient) -> float:
    """Return the server's resident memory in MiB, as its metrics report it."""
    lines = (await client.get("/metrics")).text.splitlines()
    return (
        next(
            float(line.split()[1])
            for line in lines
            if line.startswith("process_resident_memory_bytes ")
        )
        / 2**20
    )


def print_times(label: str, milliseconds: list[float], memory_mib: float) -> None:
    """Print a line with the times and the server's memory."""
    p50, longest = statistics.median(milliseconds), max(milliseconds)
    print(
        f"{label}: {len(milliseconds)} answers, p50 {p50:.1f} ms, longest {longest:.1f} ms; the server holds {memory_mib:.0f} MiB"
    )


def main() -> int:
    """Parse the flags, start the server, measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    numbers: Any = {
        "--idle": 1000,
        "--slow": 200,
        "--large": 50,
        "--pipelined": 1000,
        "--requests": 40,
    }
    for name, value in numbers.items():
        parser.add_argument(name, type=int, default=value)
    args, flags = parser.parse_known_args()
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # each connection is a file
    with run_server(args.ref, [word for word in flags if word != "--"]) as (url, exit_status):
        failures = asyncio.run(measure(url, args))
    print(
        "\n".join(failures[:20] or ["no failures, nothing left"])
        + f"; SIGTERM: exit {exit_status[0]}"
    )
    return int(bool(failures or exit_status[0]))


if __name__ == "__main__":
    raise SystemExit(main())
