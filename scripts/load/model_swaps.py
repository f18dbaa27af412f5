#!/usr/bin/env python3
"""Send mixed requests to a server of several models that do not fit into its memory together, and
kill its model processes meanwhile.

usage: .venv/bin/python scripts/load/model_swaps.py [FILE.gguf …] [--memory-limit 500M]
       [--requests 2000] [--seconds 600] [--killed 0.05] [--cancelled 0.05] [--at-once 8] [--seed 0]
       [-- FLAGS of serve]

Without files, five random models of different sizes are made. Every request is first answered
alone; under load its answer must be the same text (the server gets --reproducible; --loose leaves
it out). After a share of the requests (--killed), a random model process gets SIGKILL. No request
is repeated by the client: an answer that is lost counts as lost, but a stream whose process was
killed may go on in the next one. The load ends after --requests or --seconds.

The memory of all model processes together (proportional set size) is read all the time, and must
stay within the limit, and so must the server's own ledger. The script prints the result with the
times of loads, and exits with 1 if an answer is wrong or lost, or if the limit is exceeded.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "tests/data/stories260K"
# hidden sizes and layers of the models that are made; their heads are large enough for --reproducible
SIZES = ((256, 2), (256, 6), (512, 4), (512, 8), (768, 6))
PROMPTS = ("Once upon a time", "The little dog", "Lily went to the", "One day, Tom", "There was a")
SAMPLE_SECONDS = 0.2
REQUEST_SECONDS = 600.0


@dataclass
class Tally:
    """What has happened."""

    right: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    kills: int = 0
    seconds: list[float] = field(default_factory=list)
    most_bytes: int = 0
    most_reserved: int = 0
    load_ms: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A request: the model and the body; `path`: its API."""

    model: str
    path: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """The request as text, without how it is sent."""
        return json.dumps([self.model, self.path, {**self.body, "stream": False}])


def make_models(folder: Path) -> list[Path]:
    """Make random models of different sizes, and return their files."""
    sys.path.insert(0, str(ROOT))
    from quant.convert import checkpoint_source
    from quant.quantize import plan, write
    from tests.quant import tiny_checkpoint

    files = []
    for number, (hidden, layers) in enumerate(SIZES):
        checkpoint = tiny_checkpoint.random_llama(
            STORIES, folder / f"checkpoint{number}", hidden=hidden, layers=layers, shards=1
        )
        source = checkpoint_source.open_checkpoint(checkpoint)
        files.append(folder / f"model{number}.gguf")
        write.write_model(plan.plan_quantization(source, "Q8_0"), files[-1], threads=1)
    return files


def random_question(models: list[str], numbers: random.Random) -> Question:
    """Return a request of a random kind to a random model."""
    model, prompt = numbers.choice(models), numbers.choice(PROMPTS)
    count = numbers.choice((4, 16, 40))
    is_stream = numbers.random() < 0.5
    if numbers.random() < 0.3:
        options = {"num_predict": count, "temperature": 0, "ignore_eos": True}
        keep_alive = numbers.choice((0, "2s", "5m"))
        return Question(
            model,
            "/api/generate",
            {
                "prompt": prompt,
                "raw": True,
                "stream": is_stream,
                "options": options,
                "keep_alive": keep_alive,
            },
        )
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return Question(model, "/v1/completions", {**body, "stream": is_stream})


async def answer(api: httpx2.AsyncClient, question: Question, stops_after: int | None) -> str:
    """Return the text of an answer. `stops_after`: leave after this many pieces of a stream. Raises
    ValueError with the reason if the answer is lost.
    """
    pieces: list[str] = []
    body = {"model": question.model, **question.body}
    async with api.stream("POST", question.path, json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {(await response.aread())[:200]!r}")
        if not body["stream"]:
            return read_text(json.loads(await response.aread()))
        is_complete = False
        async for line in response.aiter_lines():
            line = line.removeprefix("data: ")
            if line == "[DONE]":
                is_complete = True
            elif line.startswith("{"):
                document = json.loads(line)
                if "error" in document:
                    raise ValueError(str(document["error"])[:200])
                pieces.append(read_text(document))
                is_complete = is_complete or bool(document.get("done"))
            if stops_after is not None and len(pieces) >= stops_after:
                break
        else:
            if not is_complete:
                raise ValueError("the stream ended early")
    return "".join(pieces)


def read_text(document: dict[str, Any]) -> str:
    """Return the text of a document of either API."""
    choices = document.get("choices")
    if choices is None:
        return str(document.get("response", ""))
    return str(choices[0].get("text") or "") if choices else ""


def model_processes(pid: int) -> list[psutil.Process]:
    """Return the model processes of a server, which are the children of its fork server."""
    found = []
    for child in psutil.Process(pid).children():
        try:
            if "forkserver" in " ".join(child.cmdline()):
                found += child.children()
        except psutil.Error:
            continue
    return found


def memory_of(processes: list[psutil.Process]) -> int:
    """Return the bytes of all these processes together; pages that they share count once."""
    total = 0
    for process in processes:
        try:
            usage = process.memory_full_info()
        except psutil.Error:
            continue
        total += getattr(usage, "pss", usage.rss)
    return total


async def watch_memory(api: httpx2.AsyncClient, pid: int, tally: Tally) -> None:
    """Read the memory of the model processes and the server's ledger until canceled."""
    while True:
        used = await asyncio.to_thread(lambda: memory_of(model_processes(pid)))
        tally.most_bytes = max(tally.most_bytes, used)
        document = (await api.get("/v1/models")).json()
        tally.most_reserved = max(tally.most_reserved, document["memory"]["reserved_bytes"])
        for model in document["data"]:
            times = tally.load_ms.setdefault(model["id"], [])
            if model["load_ms"] is not None and model["load_ms"] not in times:
                times.append(model["load_ms"])
        await asyncio.sleep(SAMPLE_SECONDS)


async def send_load(args: argparse.Namespace, url: str, pid: int, models: list[str]) -> Tally:
    """Send the load, and return what has happened."""
    numbers, tally = random.Random(args.seed), Tally()
    limits = httpx2.Limits(max_connections=args.at_once + 4)
    async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits) as api:
        questions = [random_question(models, numbers) for _ in range(args.requests)]
        alone: dict[str, str] = {}
        for question in sorted(questions, key=lambda question: question.model):
            if question.key not in alone:
                body = {**question.body, "stream": False, "keep_alive": "5m"}
                body = (
                    body if question.path.startswith("/api") else {**question.body, "stream": False}
                )
                alone[question.key] = await answer(
                    api, Question(question.model, question.path, body), None
                )
        print(f"{len(alone)} kinds of requests answered alone", flush=True)
        watcher = asyncio.create_task(watch_memory(api, pid, tally))
        began, unsent = time.monotonic(), iter(questions)

        async def client() -> None:
            for question in unsent:
                if time.monotonic() - began > args.seconds:
                    return
                leaves = question.body["stream"] and numbers.random() < args.cancelled
                started = time.monotonic()
                try:
                    text = await answer(api, question, numbers.randint(1, 4) if leaves else None)
                except (ValueError, httpx2.HTTPError) as error:
                    tally.lost.append(f"{question.model} {question.path}: {error!r}")
                    continue
                finally:
                    if numbers.random() < args.killed and (found := model_processes(pid)):
                        os.kill(numbers.choice(found).pid, signal.SIGKILL)
                        tally.kills += 1
                if leaves:
                    tally.cancelled += 1
                elif text == alone[question.key]:
                    tally.right += 1
                    tally.seconds.append(time.monotonic() - started)
                else:
                    tally.wrong.append(f"{question.key}: {text!r} != {alone[question.key]!r}")

        await asyncio.gather(*(client() for _ in range(args.at_once)))
        watcher.cancel()
        print(f"load of {time.monotonic() - began:.0f} s", flush=True)
    return tally


def print_result(tally: Tally, limit: int) -> int:
    """Print the result; return 1 if a check failed."""
    print(
        f"{tally.right} right, {len(tally.wrong)} wrong, {len(tally.lost)} lost, {tally.cancelled}"
        f" cancelled by their client, {tally.kills} processes killed"
    )
    for text, count in Counter((*tally.wrong, *tally.lost)).most_common(20):
        print(f"  {count} x {text}")
    mib = 1 << 20
    print(
        f"memory: at most {tally.most_bytes / mib:.0f} MiB, ledger at most"
        f" {tally.most_reserved / mib:.0f} MiB, limit {limit / mib:.0f} MiB"
    )
    for name, times in sorted(tally.load_ms.items()):
        if times:
            print(f"{name}: {len(times)} loads, median {statistics.median(times):.0f} ms")
    if tally.seconds:
        ordered = sorted(tally.seconds)
        print(
            f"seconds of an answer with its wait: p50 {statistics.median(ordered):.2f},"
            f" p99 {ordered[int(len(ordered) * 0.99)]:.2f}"
        )
    within = max(tally.most_bytes, tally.most_reserved) <= limit
    return 0 if within and not tally.wrong and not tally.lost else 1


def main() -> int:
    """Parse the flags, start the server, send the load and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--memory-limit", default="500M")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--killed", type=float, default=0.05)
    parser.add_argument("--cancelled", type=float, default=0.05)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loose", action="store_true", help="without --reproducible")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or make_models(Path(folder))
        words = [sys.executable, "-m", "llmcli.app", "serve", *map(str, files), "--port", "0"]
        words += ["--json", "-c", "1024", "-np", "4", "--memory-limit", args.memory_limit]
        words += [] if args.loose else ["--reproducible"]
        words += [word for word in flags if word != "--"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            try:
                tally = asyncio.run(send_load(args, ready["url"], ready["pid"], ready["models"]))
            finally:
                process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    print(f"SIGTERM: exit {code}")
    return print_result(tally, ready["memory_limit_bytes"]) or code


if __name__ == "__main__":
    sys.exit(main())
