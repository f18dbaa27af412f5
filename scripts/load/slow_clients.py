#!/usr/bin/env python3
"""A crowd that wants nothing, or says it slowly, around one client that does: what the client
notices of it.

usage: .venv/bin/python scripts/load/slow_clients.py FILE.gguf [--idle 1000] [--slow 200]
[--large 50]
       [--pipelined 1000] [--requests 40] [-- FLAGS of serve]

One client asks first alone, then beside `--idle` connections that say nothing, `--slow` whose body
comes a byte a second, `--large` that have sent all but the end of a body of eight million bytes,
and one that has sent `--pipelined` requests at once and reads one answer after another. Prints the
client's times and the memory of the server; exits with 1 where one of its requests failed, a
pipelined answer is missing or out of order, or anything is left when all went.
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
    """Of a request for an answer."""
    return (
        f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n{more}\r\n".encode()
    )


async def slowly(writer: Writer) -> None:
    """A byte a second."""
    with suppress(OSError):
        writer.write(head(len(BODY)))
        for byte in BODY:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1)


async def largely(writer: Writer) -> None:
    """All but the end."""
    with suppress(OSError):
        writer.write(head(SIZE))
        for _ in range(SIZE // 100_000 - 1):
            writer.write(b" " * 100_000)
            await writer.drain()


async def pipelined(port: int, count: int) -> list[str]:
    """So many requests at once; what is wrong with the answers."""
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
    """Milliseconds of so many answers, one after another."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        (
            await client.post(TEXT, content=BODY, headers={"content-type": "application/json"})
        ).raise_for_status()
        found.append((time.perf_counter() - began) * 1e3)
    return found


async def scene(url: str, asked: argparse.Namespace) -> list[str]:
    """Alone, beside the crowd, and when it has gone."""
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
            writer.transport.abort()  # close() would send first what nobody reads
        found += await idle(client)
        told("alone", alone, before)
        told(f"beside {counts} connections", beside, within)
    return found


async def memory(client: httpx2.AsyncClient) -> float:
    """MiB that the server holds, by its own metrics."""
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
    """One line."""
    p50, most = statistics.median(spent), max(spent)
    print(
        f"{who}: {len(spent)} answers, p50 {p50:.1f} ms, longest {most:.1f} ms; the server holds {held:.0f} MiB"
    )


def main() -> int:
    """Serve, crowd, tell."""
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # connections are files
    with served(asked.ref, [word for word in flags if word != "--"]) as (url, ended):
        found = asyncio.run(scene(url, asked))
    print("\n".join(found[:20] or ["nothing wrong, nothing left"]) + f"; SIGTERM: exit {ended[0]}")
    return int(bool(found or ended[0]))


if __name__ == "__main__":
    raise SystemExit(main())
