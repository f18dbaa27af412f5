#!/usr/bin/env python3
"""Run a long mixed load on a server: wrong answers, leaked cells, growing memory, and times.

usage: .venv/bin/python scripts/load/soak.py FILE.gguf [--requests 10000] [--cancelled 0.3]
       [--wrong 0.1] [--at-once 16] [--seed 0] [-- FLAGS of serve]

Every kind of request is first answered alone; under load its answer must be the same text. serve
gets --reproducible for this; with --loose it does not, near ties may be decided differently, and
only the number of different texts is reported. Some requests are cancelled by their client after a
random part; some are wrong and must get the right error status. At the end the server must be idle,
with a correct cell count (/v1/kv?check=true), no cells of running answers, and zero in every gauge
of running or waiting requests. The process's memory, read after each hundredth of the requests,
must not grow (slope of the second half within two standard errors of zero, or below 1 MiB), and
SIGTERM must end the server with 0. The script prints the result and exits with 1 if anything is
wrong.

Only a long run can show growth: a heap fills once, in steps (the largest body has ten MiB), and a
slope across a step means nothing. Growth counts if both quarters of the second half grow.
Otherwise, and below 2,000 requests, the run is reported as too short.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
SYSTEM = "You tell short stories to children, with simple words and a happy end. "
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TALK, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
GROWS, SHORT = "GROWS", "too short a run to show growth"
LEAST, MOST = 2000, 1.0  # requests of a run that can show growth; MiB that a second half may grow
GAUGES = (
    "llmcli_num_requests_running",
    "llmcli_num_requests_waiting",
    "llmcli_num_requests_preempted",
)
# Wrong requests, and the status that each must get.
WRONG: list[tuple[str, Any, int]] = [
    (CHAT, b"{", 400),
    (CHAT, b"[1]", 400),
    (TEXT, b"\xff", 400),
    (CHAT, {"messages": "x"}, 400),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, 400),
    (TEXT, {"prompt": None}, 400),
    (TEXT, {"prompt": "x", "temperature": "hot"}, 400),
    (TEXT, {"prompt": "x", "max_tokens": -5}, 400),
    (TEXT, {"prompt": "x", "model": "other"}, 404),
    (TEXT, {"prompt": "word " * 20_000}, 400),
    (TEXT, {"prompt": [10**9]}, 400),
    (RESPONSES, {"input": []}, 400),
    (CHAT, b"[" * 100_000, 400),
    (TEXT, {"prompt": "x", "json_schema": {"frob": 1}}, 400),
    ("/v1/nothing", {}, 404),
    (MESSAGES, {"messages": []}, 400),
    (MESSAGES, {"messages": [{"role": "user", "content": 1}]}, 400),
    (TALK, {"messages": [{"role": "user", "content": 1}]}, 400),
    (GENERATE, {"prompt": 1}, 400),
    (TALK, {"messages": [], "model": "other"}, 404),
    (CHAT, b'{"messages": "' + b"x" * 9_000_000 + b'"}', 413),
]


@dataclass(frozen=True)
class Asked:
    """A request and, after it was answered alone, the expected answer."""

    path: str
    body: dict[str, Any]
    expected: str = ""


@dataclass
class Tally:
    """The counts of all outcomes."""

    right: int = 0
    left: int = 0
    refused: int = 0
    busy: int = 0
    wrong: list[str] = field(default_factory=list)
    differing: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def kinds(chat: bool, count: int = 6) -> list[Asked]:
    """Return requests of every kind; a base model gets no chat requests."""
    openings = [
        f"Once upon a time number {number} there was a {word}"
        for number, word in zip(
            range(count), ("cat", "dog", "tree", "girl", "boat", "star"), strict=False
        )
    ]
    found = []
    for number, text in enumerate(openings):
        limit = 8 + 7 * number
        found += [
            Asked(TEXT, {"prompt": text, "max_tokens": limit}),
            Asked(TEXT, {"prompt": text, "max_tokens": limit, "stream": True}),
            Asked(TEXT, {"prompt": [text, SYSTEM], "max_tokens": 9, "n": 2, "seed": number}),
            Asked(
                TEXT,
                {
                    "prompt": SYSTEM + text,
                    "max_tokens": 12,
                    "temperature": 1.2,
                    "seed": number,
                    "logprobs": 2,
                },
            ),
            Asked(TEXT, {"prompt": text, "json_schema": SCHEMA, "max_tokens": 40}),
        ]
        if chat:
            said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            found += [
                Asked(CHAT, {"messages": said, "max_tokens": limit}),
                Asked(CHAT, {"messages": said, "max_tokens": limit, "stream": True}),
                Asked(
                    CHAT,
                    {
                        "messages": said,
                        "tools": [TOOL],
                        "tool_choice": "required",
                        "max_tokens": 60,
                        "parallel_tool_calls": False,
                    },
                ),
                Asked(
                    RESPONSES,
                    {
                        "input": text,
                        "instructions": SYSTEM,
                        "max_output_tokens": limit,
                        "stream": True,
                    },
                ),
                Asked(
                    RESPONSES, {"input": text, "instructions": SYSTEM, "max_output_tokens": limit}
                ),
                Asked(MESSAGES, {"messages": said[1:], "system": SYSTEM, "max_tokens": limit}),
                Asked(
                    MESSAGES,
                    {"messages": said[1:], "system": SYSTEM, "max_tokens": limit, "stream": True},
                ),
                Asked(
                    TALK, {"messages": said, "options": {"num_predict": limit, "temperature": 0}}
                ),
                Asked(
                    GENERATE,
                    {
                        "prompt": text,
                        "format": SCHEMA,
                        "stream": False,
                        "options": {"num_predict": 40, "temperature": 0},
                    },
                ),
            ]
    return [
        Asked(
            one.path,
            {
                "temperature": 0,
                "ignore_eos": "json_schema" not in one.body and "tools" not in one.body,
                **one.body,
            },
        )
        for one in found
    ]


def said(path: str, raw: bytes) -> str:
    """Return the content of an answer without ids and times."""
    if path in (TALK, GENERATE):
        lines = [json.loads(line) for line in raw.splitlines()]
        return "".join(
            one.get("response") or one.get("message", {}).get("content") or "" for one in lines
        )
    if raw.startswith(b"{"):
        found = json.loads(raw)
        if path in (RESPONSES, MESSAGES):
            parts = found["output" if path == RESPONSES else "content"]
            return json.dumps([one.get("content") or one.get("text") for one in parts])
        return json.dumps(
            [[one.get("text"), one.get("finish_reason"), _message(one)] for one in found["choices"]]
        )
    out: dict[int, str] = {}
    for line in raw.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if chunk.get("error"):
            return json.dumps(chunk["error"])
        if chunk.get("type", "").endswith("output_text.delta"):
            out[0] = out.get(0, "") + chunk["delta"]
        if chunk.get("type") == "content_block_delta":
            out[0] = out.get(0, "") + chunk["delta"].get("text", "")
        for one in chunk.get("choices", ()):
            text = one.get("text") or (one.get("delta") or {}).get("content") or ""
            out[one["index"]] = out.get(one["index"], "") + text
    return json.dumps(out)


def _message(choice: dict[str, Any]) -> Any:
    message = choice.get("message") or {}
    return message.get("content"), [one["function"] for one in message.get("tool_calls", ())]


async def storm(
    url: str,
    asked: list[Asked],
    requests: int,
    cancelled: float,
    wrong: float,
    at_once: int,
    seed: int,
    pid: int = 0,
) -> Tally:
    """Send all requests, `at_once` at a time."""
    tally, chance = Tally(), random.Random(seed)
    limits = httpx2.Limits(max_connections=at_once * 2, max_keepalive_connections=at_once)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        known = [
            Asked(one.path, one.body, said(one.path, (await _post(client, one)).content))
            for one in asked
        ]
        numbers = iter(range(requests))

        async def worker() -> None:
            for number in numbers:
                draw, one = chance.random(), chance.choice(known)
                if draw < wrong:
                    await _refused(client, chance.choice(WRONG), tally)
                elif draw < wrong + cancelled:
                    await _left(client, one, chance.random(), tally)
                else:
                    await _answered(client, one, tally)
                if pid and number % max(1, requests // 100) == 0:
                    tally.memory.append(resident(pid))

        await asyncio.gather(*(worker() for _ in range(at_once)))
    return tally


async def _post(client: httpx2.AsyncClient, one: Asked) -> httpx2.Response:
    answer = await client.post(one.path, json=one.body)
    if answer.status_code != 200:
        raise SystemExit(f"{one.path} {one.body}: {answer.status_code} {answer.text[:300]}")
    return answer


async def _answered(client: httpx2.AsyncClient, one: Asked, tally: Tally) -> None:
    began = time.perf_counter()
    answer = await client.post(one.path, json=one.body)
    if answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1:
        tally.busy += 1
        return
    tally.seconds.append(time.perf_counter() - began)
    if answer.status_code != 200:
        tally.wrong.append(f"{one.path} {answer.status_code}: {answer.text[:200]}")
    elif said(one.path, answer.content) != one.expected:
        tally.differing[f"{one.path} {'stream' if one.body.get('stream') else 'whole'}"] += 1
    else:
        tally.right += 1


async def _left(client: httpx2.AsyncClient, one: Asked, share: float, tally: Tally) -> None:
    """Disconnect before the answer or after a few pieces of it."""
    tally.left += 1
    try:
        async with (
            asyncio.timeout(share * 0.2),
            client.stream("POST", one.path, json=one.body) as answer,
        ):
            async for _ in answer.aiter_raw():
                if share < 0.3:
                    return
    except (TimeoutError, httpx2.HTTPError):
        pass


async def _refused(client: httpx2.AsyncClient, wrong: tuple[str, Any, int], tally: Tally) -> None:
    path, body, status = wrong
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]  # only a string on ollama's paths
    good = answer.status_code == status and bool(
        error if isinstance(error, str) else error["message"]
    )
    tally.refused += good
    if not good:
        tally.wrong.append(
            f"{path} {content[:60]!r}: {answer.status_code} instead of {status}: {answer.text[:200]}"
        )


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def slope(values: list[float]) -> tuple[float, float]:
    """Return the growth over all values by least squares, and its standard error."""
    count = len(values)
    if count < 3:
        return 0.0, 0.0
    middle, mean = (count - 1) / 2, statistics.fmean(values)
    spread = sum((index - middle) ** 2 for index in range(count))
    rate = sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
    rest = sum((value - mean - rate * (index - middle)) ** 2 for index, value in enumerate(values))
    return rate * count, (rest / (count - 2) / spread) ** 0.5 * count


def growth(memory: list[float], requests: int) -> tuple[str, float, float]:
    """Return the verdict, the growth over the second half, and its standard error."""
    middle, last = len(memory) // 2, len(memory) * 3 // 4
    grown, error = slope(memory[middle:])
    if grown <= max(MOST, 2 * error):
        return "flat", grown, error
    quarters = (slope(memory[middle:last]), slope(memory[last:]))
    both = all(one > max(MOST / 2, 2 * noise) for one, noise in quarters)
    return GROWS if both and requests >= LEAST else SHORT, grown, error


async def settled(url: str) -> dict[str, Any]:
    """Wait until nothing runs or waits; return the report of the checked cells."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            report: dict[str, Any] = (
                (await client.get("/v1/kv?check=true")).raise_for_status().json()
            )
            if not report["running"] and not report["waiting"]:
                lines = (await client.get("/metrics")).text.splitlines()
                report["gauges"] = [
                    line for line in lines if line.startswith(GAUGES) and line.split()[1] != "0"
                ]
                if opened := (await client.get("/health")).json()["open"]:
                    report["gauges"].append(f"open {opened}")
                return report
            await asyncio.sleep(0.05)


def main() -> int:
    """Serve, send and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--cancelled", type=float, default=0.3)
    parser.add_argument("--wrong", type=float, default=0.1)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loose", action="store_true", help="without --reproducible")
    parser.add_argument("--base", action="store_true", help="the model has no chat template")
    asked, flags = parser.parse_known_args()
    words = [sys.executable, "-m", "llmcli.app", "serve", asked.ref, "--port", "0", "--json"]
    words += ([] if asked.loose else ["--reproducible"]) + [word for word in flags if word != "--"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        began = time.monotonic()
        tally = asyncio.run(
            storm(
                ready["url"],
                kinds(not asked.base),
                asked.requests,
                asked.cancelled,
                asked.wrong,
                asked.at_once,
                asked.seed,
                ready["pid"],
            )
        )
        spent, report = time.monotonic() - began, asyncio.run(settled(ready["url"]))
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    return told(asked, tally, spent, report, code)


def told(
    asked: argparse.Namespace, tally: Tally, spent: float, report: dict[str, Any], code: int
) -> int:
    """Print the result; return 1 if anything is wrong."""
    print(
        f"{asked.requests} requests in {spent:.0f} s, {asked.at_once} at once: {tally.right} right, "
        f"{tally.left} cancelled by their client, {tally.refused} wrong ones refused, {tally.busy} asked to retry, "
        f"{sum(tally.differing.values())} with another text, {len(tally.wrong)} answered wrongly"
    )
    for words in [
        *tally.wrong[:20],
        *(f"another text: {count} of {kind}" for kind, count in tally.differing.items()),
    ]:
        print("  " + words)
    running = [one for one in report["sequences"] if one["state"] == "running"]
    running += report["gauges"]
    print(
        f"idle: {len(running)} sequences and gauges of answers left, {report['used_cells']} of {report['cells']} "
        f"cells kept for prefixes, cell count right; SIGTERM: exit {code}"
    )
    verdict, grown, error = growth(tally.memory, asked.requests)
    print(
        f"memory: {tally.memory[0]:.1f} MiB at the start, {tally.memory[-1]:.1f} at the end; over the second half "
        f"{grown:+.2f} ± {error:.2f} MiB: {verdict}"
    )
    ordered = sorted(tally.seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
    print(
        f"time of an answer: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, longest {ordered[-1] * 1e3:.0f} ms"
    )
    differ = sum(tally.differing.values()) if not asked.loose else 0
    return int(bool(tally.wrong or differ or running or code or verdict == GROWS))


if __name__ == "__main__":
    raise SystemExit(main())
