#!/usr/bin/env python3
"""Send mixed requests to a server of several models that do not fit into its memory together, and
kill its model processes meanwhile.

usage: .venv/bin/python scripts/load/model_swaps.py [FILE.gguf …] [--memory-limit 500M]
       [--requests 2000] [--seconds 600] [--killed 0.05] [--cancelled 0.05] [--at-once 32] [--seed 0]
       [--forms completions,chat,…] [--rounds 3] [--llama-server FILE --models-max 2]
       [-- FLAGS of serve]

Without files, five random models of different sizes are made. Every request is first answered
alone; under load its answer must be the same text (the server gets --reproducible; --loose leaves
it out). After a share of the requests (--killed), a random model process gets SIGKILL. No request
is repeated by the client: an answer that is lost counts as lost, but a stream whose process was
killed may go on in the next one. The load ends after --requests or --seconds. Then the models are
asked in turn, so that each answer needs a swap, and the times of these answers are printed.

The memory of all model processes together (proportional set size) is read all the time, and must
stay within the limit, and so must the server's own ledger. The script prints the result with the
times of loads, and exits with 1 if an answer is wrong or lost, or if the limit is exceeded.

With --llama-server, the router of llama.cpp's server gets the same requests afterwards, with the
same files; it limits the number of models instead of their memory. Choose --forms that it has.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from scripts.load.server_process import free_port, wait_or_kill, wait_until_healthy

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "tests/data/stories260K"
# hidden sizes and layers of the models that are made; their heads are large enough for --reproducible
SIZES = ((256, 2), (256, 6), (512, 4), (512, 8), (768, 6))
PROMPTS = ("Once upon a time", "The little dog", "Lily went to the", "One day, Tom", "There was a")
# the path of each form of a request
FORMS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "generate": "/api/generate",
    "ollama_chat": "/api/chat",
}
LAST_TYPES = ("message_stop", "response.completed", "response.incomplete")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAMPLE_SECONDS = 0.2
ALONE_TRIES = 5
REQUEST_SECONDS = 600.0
START_SECONDS = 120.0  # how long a server may take to start
END_SECONDS = 60.0  # how long it may take to end


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
    load_seconds: float = 0.0
    swap_seconds: dict[str, list[float]] = field(default_factory=dict)


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
        (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
        source = checkpoint_source.open_checkpoint(checkpoint)
        files.append(folder / f"model{number}.gguf")
        write.write_model(plan.plan_quantization(source, "Q8_0"), files[-1], threads=1)
    return files


def random_question(models: list[str], forms: list[str], numbers: random.Random) -> Question:
    """Return a request of a random form to a random model."""
    model, prompt = numbers.choice(models), numbers.choice(PROMPTS)
    count, form = numbers.choice((4, 16, 40)), numbers.choice(forms)
    body: dict[str, Any] = {"temperature": 0, "stream": numbers.random() < 0.5}
    messages = [{"role": "user", "content": prompt}]
    if form in ("generate", "ollama_chat"):
        options = {"num_predict": count, "temperature": 0, "ignore_eos": True}
        keep_alive = numbers.choice((0, "2s", "5m"))
        body = {"stream": body["stream"], "options": options, "keep_alive": keep_alive}
        body |= {"prompt": prompt, "raw": True} if form == "generate" else {"messages": messages}
    elif form == "completions":
        body |= {"prompt": prompt, "max_tokens": count, "ignore_eos": True}
    elif form == "responses":
        body |= {"input": prompt, "max_output_tokens": count}
    else:
        body |= {"messages": messages, "max_tokens": count}
    return Question(model, FORMS[form], body)


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
            line = line.removeprefix(
                "data: "
            ).lstrip()  # spaces are the sign of life of ollama's streams
            if line == "[DONE]":
                is_complete = True
            elif line.startswith("{"):
                document = json.loads(line)
                if document.get("error"):
                    raise ValueError(str(document["error"])[:200])
                is_last = document.get("type") in LAST_TYPES
                pieces.append("" if is_last else read_text(document))
                is_complete = is_complete or is_last or bool(document.get("done"))
            if stops_after is not None and len(pieces) >= stops_after:
                break
        else:
            if not is_complete:
                raise ValueError("the stream ended early")
    return "".join(pieces)


def read_text(document: dict[str, Any]) -> str:
    """Return the text of a document of any form, or of an event of its stream."""
    if "choices" in document:
        choice = (document["choices"] or [{}])[0]
        message = choice.get("delta") or choice.get("message") or {}
        return str(choice.get("text") or message.get("content") or "")
    if "message" in document and "done" in document:  # ollama's chat
        return str(document["message"].get("content", ""))
    if "response" in document and "done" in document:
        return str(document["response"])
    delta = document.get("delta")
    if document.get("type") == "response.output_text.delta":
        return str(delta)
    if document.get("type") == "content_block_delta":
        return str(delta.get("text", ""))
    blocks = document.get("content") or [
        block for item in document.get("output") or () for block in item.get("content") or ()
    ]
    return "".join(str(block.get("text", "")) for block in blocks)


def model_processes(pid: int) -> list[psutil.Process]:
    """Return the model processes of a server: the children of llmcli's fork server, or those of
    llama-server.
    """
    found = []
    for child in psutil.Process(pid).children():
        try:
            command = " ".join(child.cmdline())
            if "forkserver" in command:
                found += child.children()
            elif "llama-server" in command:
                found.append(child)
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
        if "memory" in document:  # llama-server has no ledger
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
        forms = args.forms.split(",")
        questions = [random_question(models, forms, numbers) for _ in range(args.requests)]
        alone: dict[str, str] = {}
        for question in sorted(questions, key=lambda question: question.model):
            if question.key not in alone:
                body = {**question.body, "stream": False}
                body |= {"keep_alive": "5m"} if "keep_alive" in body else {}
                request = Question(question.model, question.path, body)
                alone[question.key] = await answer_alone(api, request)
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
        tally.load_seconds = time.monotonic() - began
        await measure_swaps(api, models, args.rounds, tally)
        if watcher.done():  # it has failed, so that the limits were not watched
            watcher.result()
        watcher.cancel()
    return tally


async def answer_alone(api: httpx2.AsyncClient, request: Question) -> str:
    """Return the text of an answer without load. It is asked for again if the server closes the
    connection, as llama-server's router does now and then.
    """
    for _ in range(ALONE_TRIES - 1):
        with suppress(httpx2.RemoteProtocolError):
            return await answer(api, request, None)
    return await answer(api, request, None)


async def measure_swaps(
    api: httpx2.AsyncClient, models: list[str], rounds: int, tally: Tally
) -> None:
    """Ask the models in turn, so that none is loaded when it is asked, and note the seconds of
    these answers of one token.
    """
    body = {"prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0, "stream": False}
    for _ in range(rounds):
        for model in models:
            started = time.monotonic()
            await answer(api, Question(model, FORMS["completions"], body), None)
            tally.swap_seconds.setdefault(model, []).append(time.monotonic() - started)


def print_result(tally: Tally, limit: int | None) -> int:
    """Print the result; return 1 if a check failed. `limit`: bytes; None: the server has none."""
    print(
        f"{tally.right} right, {len(tally.wrong)} wrong, {len(tally.lost)} lost, {tally.cancelled}"
        f" cancelled by their client, {tally.kills} processes killed, in {tally.load_seconds:.0f} s"
    )
    for text, count in Counter((*tally.wrong, *tally.lost)).most_common(20):
        print(f"  {count} x {text}")
    mib = 1 << 20
    ledger = (
        ""
        if limit is None
        else (f", ledger at most {tally.most_reserved / mib:.0f} MiB, limit {limit / mib:.0f} MiB")
    )
    print(f"memory: at most {tally.most_bytes / mib:.0f} MiB{ledger}")
    for name, times in sorted(tally.load_ms.items()):
        if times:
            print(f"{name}: {len(times)} loads, median {statistics.median(times):.0f} ms")
    for name, seconds in tally.swap_seconds.items():
        print(f"{name}: first answer after a swap, median {statistics.median(seconds):.2f} s")
    if tally.seconds:
        ordered = sorted(tally.seconds)
        print(
            f"seconds of an answer with its wait: p50 {statistics.median(ordered):.2f},"
            f" p99 {ordered[int(len(ordered) * 0.99)]:.2f}",
            flush=True,
        )
    if not tally.most_bytes:
        print("the memory of the model processes was never read")
    within = tally.most_bytes > 0 and (
        limit is None or max(tally.most_bytes, tally.most_reserved) <= limit
    )
    return 0 if within and not tally.wrong and not tally.lost else 1


def load_llmcli(args: argparse.Namespace, files: list[Path], flags: list[str]) -> int:
    """Run `llmcli serve` under the load, and print the result; return the exit code."""
    words = [sys.executable, "-m", "llmcli.app", "serve", *map(str, files), "--port", "0", "--json"]
    words += [
        "-t",
        str(args.threads),
        "-c",
        "1024",
        "-np",
        "4",
        "--memory-limit",
        args.memory_limit,
    ]
    words += [] if args.loose else ["--reproducible"]
    words += flags
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        try:
            tally = asyncio.run(send_load(args, ready["url"], ready["pid"], ready["models"]))
        finally:
            process.send_signal(signal.SIGTERM)
            code = wait_or_kill(process)
    print(f"llmcli; SIGTERM: exit {code}")
    return print_result(tally, ready["memory_limit_bytes"]) or code


def load_router(args: argparse.Namespace, files: list[Path], folder: Path) -> None:
    """Run llama-server's router under the load, and print the result."""
    folder.mkdir()
    for file in files:
        (folder / file.name).symlink_to(file.absolute())
    port = free_port()
    words = [str(args.llama_server), "--models-dir", str(folder), "--port", str(port), "-np", "4"]
    words += ["--models-max", str(args.models_max), "-c", "1024", "-t", str(args.threads)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_healthy(url, process)
            names = [model["id"] for model in httpx2.get(f"{url}/v1/models").json()["data"]]
            tally = asyncio.run(send_load(args, url, process.pid, names))
        finally:
            process.terminate()
            wait_or_kill(process)
    print("llama-server")
    print_result(tally, None)


def parse_words(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this script, and those of `serve`, which follow "--"."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--memory-limit", default="500M")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--killed", type=float, default=0.05)
    parser.add_argument("--cancelled", type=float, default=0.05)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rounds", type=int, default=3, help="of swaps after the load")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--models-max", type=int, default=2)
    parser.add_argument("--loose", action="store_true", help="without --reproducible")
    end = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end]), list(words[end + 1 :])


def main() -> int:
    """Parse the flags, send the load to the servers and print; return the exit code."""
    args, flags = parse_words(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or make_models(Path(folder))
        code = load_llmcli(args, files, flags)
        if args.llama_server:
            load_router(args, files, Path(folder) / "router")
    return code


if __name__ == "__main__":
    sys.exit(main())
