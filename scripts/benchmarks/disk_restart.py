#!/usr/bin/env python3
"""Measure what a server with `--cache-dir` saves after it was killed while it answered.

usage: .venv/bin/python scripts/benchmarks/disk_restart.py [REF] [--conversations 20]
       [--tokens 2000] [--answer 16] [-c 49152] [-t N] [--cache-dir FOLDER] [--gap]

Conversations of random tokens are sent one after another to a new `llmcli serve`. It is killed by
SIGKILL while it answers another request, and started again. Each conversation then goes on with a
few new tokens. The script prints the share of the prompts' tokens that came from the disk, and the
time to the first token, each beside that of computing anew: the first turn. It exits with 1 if the
share is below 0.95, or the median of the times above 0.1 of those anew.

With `--gap`, the restarted server streams an answer while it restores each conversation (100 MB with
SmolLM2 and 2200 tokens). The script prints the longest gap between two tokens of that stream, and
that of a turn with as many new tokens whose beginning is in memory: the difference is what restoring
costs. Then a server without other answers restores each conversation, and the script prints the time
to the first token of a short request right behind it, and of one alone.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MIN_SHARE, MAX_RATIO = 0.95, 0.1
NEW_TOKENS = 8
BLOCK_TOKENS = 16  # of the cache
WARM_TOKENS = 40
MAX_WARM_SECONDS = 120.0
JSON = {"Content-Type": "application/json"}


@contextmanager
def serve(args: argparse.Namespace, folder: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `llmcli serve`. Yield the process and its address."""
    words = [sys.executable, "-m", "llmcli.app", "serve", args.ref, "--port", "0", "--json"]
    words += ["-c", str(args.ctx), "--cache-dir", folder]
    words += ["-t", str(args.threads)] if args.threads else []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def send(url: str, tokens: list[int], count: int, **more: Any) -> Any:
    """Send a prompt of tokens, and return the open response."""
    body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), JSON)
    return urllib.request.urlopen(request)


def ask(url: str, tokens: list[int], count: int) -> tuple[float, int]:
    """Return the seconds to the first token, and the tokens of the prompt that came from the disk."""
    begun, first, n_disk = time.perf_counter(), 0.0, 0
    with send(url, tokens, count, stream=True, stream_options={"include_usage": True}) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                usage = json.loads(line[6:]).get("usage") or {}
                n_disk = (usage.get("prompt_tokens_details") or {}).get("disk_tokens", n_disk)
    return first, n_disk


def wait_until_written(url: str) -> None:
    """Return when no finished answer waits to be written."""
    while True:
        with urllib.request.urlopen(f"{url}/v1/kv") as response:
            disk = json.load(response)["disk"]
        if disk["written_bytes"] and not disk["queued_bytes"]:
            return
        time.sleep(0.05)


class TimedStream(threading.Thread):
    """Streams an answer, and records when its tokens come."""

    def __init__(self, url: str, prompt: list[int], count: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.has_warmed = threading.Event()  # after WARM_TOKENS tokens
        self._arguments = url, prompt, count
        self.start()

    def run(self) -> None:
        """Read the stream to its end, or until the server is killed."""
        with suppress(OSError), send(*self._arguments, stream=True) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())
                    if len(self.times) == WARM_TOKENS:
                        self.has_warmed.set()


def longest_gap(stream: TimedStream, begun: float, ended: float) -> float:
    """Return the longest time between two tokens of a stream between two times, in seconds."""
    times = stream.times.copy()
    before = [at for at in times if at < begun]
    during = [at for at in times if begun <= at < ended]
    return max(after - at for at, after in pairwise([before[-1], *during, ended]))


def measure_gaps(args: argparse.Namespace, folder: str, turns: list[list[int]]) -> None:
    """Print how long other answers wait while conversations are restored."""
    restored, cached, shares, waits, waits_alone = [], [], [], [], []
    for turn in turns:
        with serve(args, folder) as (_, url):
            stream = TimedStream(url, [5, 6, 7], args.ctx // 2)
            assert stream.has_warmed.wait(MAX_WARM_SECONDS), "the stream gives no tokens"
            # the second turn has as many tokens to compute as the first, but no state to restore
            end = (len(turn) - NEW_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
            for found, tokens in ((restored, turn), (cached, [*turn[:end], *turn[:end:-1], 5])):
                begun = time.perf_counter()
                _, n_disk = ask(url, tokens, 1)
                assert stream.is_alive(), "the stream ended before the turn"
                found.append(longest_gap(stream, begun, time.perf_counter()))
                shares += [n_disk / len(turn)] if tokens is turn else []
        with serve(args, folder) as (_, url):
            ask(url, [8, 9, 10], 4)
            waits_alone.append(ask(url, [8, 9, 11], 4)[0])
            connection = http.client.HTTPConnection(url.removeprefix("http://"))
            body = json.dumps({"prompt": turn, "max_tokens": 1})
            with closing(connection):
                connection.request("POST", "/v1/completions", body, JSON)  # it does not wait
                waits.append(ask(url, [8, 9, 12], 4)[0])
                assert connection.getresponse().status == 200
    for name, values in (
        ("longest gap, restoring", restored),
        ("longest gap, in memory", cached),
        ("short request behind", waits),
        ("short request alone", waits_alone),
    ):
        print(
            f"{name:24}{statistics.median(values) * 1e3:.0f} ms (at most {max(values) * 1e3:.0f})"
        )
    print(f"{'tokens from the disk':24}{statistics.mean(shares):.1%}")


def main() -> int:
    """Run the two servers, and print what the second one saves."""
    parser = argparse.ArgumentParser(description="see the docstring")
    parser.add_argument("ref", nargs="?", default="smollm2:135m")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("-c", "--ctx", type=int, default=49_152)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--cache-dir")
    parser.add_argument("--gap", action="store_true")
    args = parser.parse_args()
    rng = random.Random(31)
    texts = [rng.choices(range(1000, 30_000), k=args.tokens) for _ in range(args.conversations)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.cache_dir or scratch
        with serve(args, folder) as (process, url):
            anew = [ask(url, text, args.answer)[0] for text in texts]
            wait_until_written(url)
            with send(url, [5, 6, 7], args.ctx // 2, stream=True) as response:
                response.readline()
                process.kill()
                process.wait()
        turns = [text + rng.choices(range(1000, 30_000), k=NEW_TOKENS) for text in texts]
        if args.gap:
            measure_gaps(args, folder, turns)
            return 0
        with serve(args, folder) as (_, url):
            again = [ask(url, turn, args.answer) for turn in turns]
    share = sum(n_disk for _, n_disk in again) / sum(map(len, turns))
    seconds = statistics.median(first for first, _ in again)
    ratio = seconds / statistics.median(anew)
    print(f"conversations         {len(texts)} of {args.tokens} tokens")
    print(f"tokens from the disk  {share:.1%} (at least {MIN_SHARE:.0%})")
    print(f"first token, anew     {statistics.median(anew):.3f} s")
    print(f"first token, restart  {seconds:.3f} s, {ratio:.3f} of it (at most {MAX_RATIO})")
    return 0 if share >= MIN_SHARE and ratio <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
