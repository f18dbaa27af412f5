#!/usr/bin/env python3
"""Measure one client beside many idle and slow ones.

usage: .venv/bin/python scripts/load/slow_clients.py FILE.gguf [--idle 1000] [--slow 200]
       [--large 50] [--pipelined 1000] [--requests 40] [-- FLAGS of serve]

One client first sends requests alone. Then it sends them beside `--idle` silent connections,
`--slow` ones that send a byte per second, `--large` ones that have sent all but the end of a body
of eight million bytes, and one that has sent `--pipelined` requests at once and reads the answers
in turn. The script prints the client's times and the server's memory. It exits with 1 if one of the
client's requests fails, a pipelined answer is missing or out of order, or anything is left at the
end.
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

from scripts.fuzz.http_requests import idle, served

TEXT = "/v1/completions"
BODY = b'{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}'
SIZE = 8_000_000
Writer = asyncio.StreamWriter


def head(size: int, more: str = "") -> bytes:
    """Return the head of a request for an answer."""
    return (
        f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n{more}\r\n".encode()
    )


async def slowly(writer: Writer) -> None:
    """Send a body with one byte per second."""
    with suppress(OSError):
        writer.write(head(len(BODY)))
        for byte in BODY:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1)


async def largely(writer: Writer) -> None:
    """Send a body without its end."""
    with suppress(OSError):
        writer.write(head(SIZE))
        for _ in range(SIZE // 100_000 - 1):
            writer.write(b" " * 100_000)
            await writer.drain()


async def pipelined(port: int, count: int) -> list[str]:
    """Send many requests at once; return what is wrong with the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    asked = [(head(len(BODY)) + BODY, 200), *[(health, 200), (head(1) + b"{", 400)] * 10]
    writer.write(b"".join(asked[number % len(asked)][0] for number in range(count)))
    found = []
    for number in range(count):
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        if int(lines[0].split()[1]) != asked[number % len(asked)][1]:
            found.append(f"pipelined request {number}: {lines[0].decode()}")
        size = next(
            int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(size)
    writer.close()
    return found


async def times(client: httpx2.AsyncClient, count: int) -> list[float]:
    """Return the milliseconds of several answers in turn."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        (
            await client.post(TEXT, content=BODY, headers={"content-type": "application/json"})
        ).raise_for_status()
        found.append((time.perf_counter() - began) * 1e3)
    return found


async def scene(url: str, asked: argparse.Namespace) -> list[str]:
    """Measure alone, beside the others, and after they disconnect."""
    port, found = int(url.rpartition(":")[2]), list[str]()
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        alone = await times(client, asked.requests)
        before = await memory(client)
        counts = asked.idle + asked.slow + asked.large
        links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(counts)]
        writers = [writer for _, writer in links]
        tasks = [
            asyncio.create_task(slowly(one))
            for one in writers[asked.idle : asked.idle + asked.slow]
        ]
        tasks += [asyncio.create_task(largely(one)) for one in writers[asked.idle + asked.slow :]]
        pipe = asyncio.create_task(pipelined(port, asked.pipelined))
        beside = await times(client, asked.requests)
        within = await memory(client)
        found += await pipe
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.transport.abort()  # close() would first send data that is never read
        found += await idle(client)
        told("alone", alone, before)
        told(f"beside {counts} connections", beside, within)
    return found


async def memory(client: httpx2.AsyncClient) -> float:
    """Return the server's memory in MiB by its own metrics."""
    lines = (await client.get("/metrics")).text.splitlines()
    return (
        next(
            float(line.split()[1])
            for line in lines
            if line.startswith("process_resident_memory_bytes ")
        )
        / 2**20
    )


def told(who: str, spent: list[float], held: float) -> None:
    """Print one line."""
    p50, most = statistics.median(spent), max(spent)
    print(
        f"{who}: {len(spent)} answers, p50 {p50:.1f} ms, longest {most:.1f} ms; the server holds {held:.0f} MiB"
    )


def main() -> int:
    """Serve, connect and report."""
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
    asked, flags = parser.parse_known_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is a file
    with served(asked.ref, [word for word in flags if word != "--"]) as (url, ended):
        found = asyncio.run(scene(url, asked))
    print("\n".join(found[:20] or ["no failures, nothing left"]) + f"; SIGTERM: exit {ended[0]}")
    return int(bool(found or ended[0]))


if __name__ == "__main__":
    raise SystemExit(main())
