#!/usr/bin/env python3
"""Run a long mixed load on a server, and look for wrong answers, leaked cells and growing memory.

usage: .venv/bin/python scripts/load/soak.py FILE.gguf [--requests 10000] [--cancelled 0.3]
       [--wrong 0.1] [--at-once 16] [--seed 0] [-- FLAGS of serve]

Every kind of request is first answered alone; under load its answer must be the same text. The
server gets --reproducible for this. With --loose it does not, and different texts are only counted.
Some requests are cancelled by their client at a random moment. Some are wrong and must get the
right error status. At the end the server must be idle, with a correct cell count
(/v1/kv?check=true), no running sequences, and zero in every gauge of running or waiting requests.
The process's memory, read after each hundredth of the requests, must not grow (the slope of the
second half is within two standard errors of zero, or below 1 MiB). SIGTERM must end the server with
0. The script prints the result and exits with 1 if any of this is violated.

Only a long run can show growth. A heap also fills once, in steps (the largest body has ten MiB),
and a slope across a step is no leak. Therefore growth is a failure only if both quarters of the
second half grow. Otherwise, or with fewer than 2,000 requests, the run is reported as too short.
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
GROWS, TOO_SHORT = "GROWS", "too short a run to show growth"
MIN_REQUESTS, MAX_GROWTH_MIB = (
    2000,
    1.0,
)  # requests of a run that can show growth; MiB that a second half may grow
GAUGES = (
    "llmcli_num_requests_running",
    "llmcli_num_requests_waiting",
    "llmcli_num_requests_preempted",
)
# Wrong requests, and the status that each must get.
WRONG_REQUESTS: list[tuple[str, Any, int]] = [
    (CHAT, b"{", 400),
    (CHAT, b"[1]", 400),
    (TEXT, b"\xff", 400),
    (CHAT, {"messages": "x"}, 400),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, 400),
    (TEXT, {"prompt": None}, 400),
    (TEXT, {"prompt": "x", "temperature": "hot"}, 400),
    (TEXT, {"prompt": "x", "max_tokens": -5}, 400),
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
    (CHAT, b'{"messages": "' + b"x" * 9_000_000 + b'"}', 413),
]


@dataclass(frozen=True)
class LoadRequest:
    """A request of the load. `expected`: the content of its answer when it was sent alone, or ""
    before that.
    """

    path: str
    body: dict[str, Any]
    expected: str = ""


@dataclass
class Tally:
    """The outcomes of all requests.

    `right`: answers equal to the expected one. `refused`: wrong requests with the right error.
    `busy`: requests that were asked to retry later (429). `wrong`: messages about failures.
    `differing`: other texts by kind of request. `seconds`: of each answer. `memory`: MiB of the
    server in order of time.
    """

    right: int = 0
    cancelled: int = 0
    refused: int = 0
    busy: int = 0
    wrong: list[str] = field(default_factory=list)
    differing: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def requests_of_every_kind(chat: bool, count: int = 6) -> list[LoadRequest]:
    """Return requests of every kind with `count` different texts. `chat`: include chat requests,
    for which the model needs a chat template.
    """
    openings = [
        f"Once upon a time number {number} there was a {word}"
        for number, word in zip(
            range(count), ("cat", "dog", "tree", "girl", "boat", "star"), strict=False
        )
    ]
    requests = []
    for number, text in enumerate(openings):
        limit = 8 + 7 * number
        requests += [
            LoadRequest(TEXT, {"prompt": text, "max_tokens": limit}),
            LoadRequest(TEXT, {"prompt": text, "max_tokens": limit, "stream": True}),
            LoadRequest(TEXT, {"prompt": [text, SYSTEM], "max_tokens": 9, "n": 2, "seed": number}),
            LoadRequest(
                TEXT,
                {
                    "prompt": SYSTEM + text,
                    "max_tokens": 12,
                    "temperature": 1.2,
                    "seed": number,
                    "logprobs": 2,
                },
            ),
            LoadRequest(TEXT, {"prompt": text, "json_schema": SCHEMA, "max_tokens": 40}),
        ]
        if chat:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            requests += [
                LoadRequest(CHAT, {"messages": messages, "max_tokens": limit}),
                LoadRequest(CHAT, {"messages": messages, "max_tokens": limit, "stream": True}),
                LoadRequest(
                    CHAT,
                    {
                        "messages": messages,
                        "tools": [TOOL],
                        "tool_choice": "required",
                        "max_tokens": 60,
                        "parallel_tool_calls": False,
                    },
                ),
                LoadRequest(
                    RESPONSES,
                    {
                        "input": text,
                        "instructions": SYSTEM,
                        "max_output_tokens": limit,
                        "stream": True,
                    },
                ),
                LoadRequest(
                    RESPONSES, {"input": text, "instructions": SYSTEM, "max_output_tokens": limit}
                ),
                LoadRequest(
                    MESSAGES, {"messages": messages[1:], "system": SYSTEM, "max_tokens": limit}
                ),
                LoadRequest(
                    MESSAGES,
                    {
                        "messages": messages[1:],
                        "system": SYSTEM,
                        "max_tokens": limit,
                        "stream": True,
                    },
                ),
                LoadRequest(
                    TALK,
                    {"messages": messages, "options": {"num_predict": limit, "temperature": 0}},
                ),
                LoadRequest(
                    GENERATE,
                    {
                        "prompt": text,
                        "format": SCHEMA,
                        "stream": False,
                        "options": {"num_predict": 40, "temperature": 0},
                    },
                ),
            ]
    for request in requests:
        # ollama's clients set such fields in options
        fields = request.body.get("options", request.body)
        fields.setdefault("temperature", 0)
        is_free = not {"json_schema", "tools", "format"} & request.body.keys()
        fields.setdefault("ignore_eos", is_free)
    return requests


def answer_content(path: str, raw: bytes) -> str:
    """Return the content of a response without ids and times, so that two responses can be
    compared. `raw` is a JSON document, JSON lines, or an event stream.
    """
    if path in (TALK, GENERATE):
        lines = [json.loads(line) for line in raw.splitlines()]
        return "".join(
            item.get("response") or item.get("message", {}).get("content") or "" for item in lines
        )
    if raw.startswith(b"{"):
        document = json.loads(raw)
        if path in (RESPONSES, MESSAGES):
            parts = document["output" if path == RESPONSES else "content"]
            return json.dumps([item.get("content") or item.get("text") for item in parts])
        return json.dumps(
            [
                [item.get("text"), item.get("finish_reason"), _message(item)]
                for item in document["choices"]
            ]
        )
    texts: dict[int, str] = {}
    for line in raw.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if chunk.get("error"):
            return json.dumps(chunk["error"])
        if chunk.get("type", "").endswith("output_text.delta"):
            texts[0] = texts.get(0, "") + chunk["delta"]
        if chunk.get("type") == "content_block_delta":
            texts[0] = texts.get(0, "") + chunk["delta"].get("text", "")
        for item in chunk.get("choices", ()):
            text = item.get("text") or (item.get("delta") or {}).get("content") or ""
            texts[item["index"]] = texts.get(item["index"], "") + text
    return json.dumps(texts)


def _message(choice: dict[str, Any]) -> Any:
    message = choice.get("message") or {}
    return message.get("content"), [call["function"] for call in message.get("tool_calls", ())]


async def send_load(
    url: str,
    kinds: list[LoadRequest],
    requests: int,
    cancelled_share: float,
    wrong_share: float,
    at_once: int,
    seed: int,
    pid: int = 0,
) -> Tally:
    """Send one request of each kind alone, then `requests` random ones, `at_once` at the same time.
    Return the outcomes.

    `cancelled_share`, `wrong_share`: probabilities of a cancelled and of a wrong request. `pid`:
    the process whose memory is recorded; 0 for none.
    """
    tally, rng = Tally(), random.Random(seed)
    limits = httpx2.Limits(max_connections=at_once * 2, max_keepalive_connections=at_once)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        answered_alone = [
            LoadRequest(
                kind.path, kind.body, answer_content(kind.path, (await _post(client, kind)).content)
            )
            for kind in kinds
        ]
        numbers = iter(range(requests))

        async def worker() -> None:
            for number in numbers:
                draw, kind = rng.random(), rng.choice(answered_alone)
                if draw < wrong_share:
                    await _expect_refusal(client, rng.choice(WRONG_REQUESTS), tally)
                elif draw < wrong_share + cancelled_share:
                    await _cancel_request(client, kind, rng.random(), tally)
                else:
                    await _compare_answer(client, kind, tally)
                if pid and number % max(1, requests // 100) == 0:
                    tally.memory.append(resident_mib(pid))

        await asyncio.gather(*(worker() for _ in range(at_once)))
    return tally


async def _post(client: httpx2.AsyncClient, request: LoadRequest) -> httpx2.Response:
    answer = await client.post(request.path, json=request.body)
    if answer.status_code != 200:
        raise SystemExit(f"{request.path} {request.body}: {answer.status_code} {answer.text[:300]}")
    return answer


async def _compare_answer(client: httpx2.AsyncClient, request: LoadRequest, tally: Tally) -> None:
    began = time.perf_counter()
    answer = await client.post(request.path, json=request.body)
    if answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1:
        tally.busy += 1
        return
    tally.seconds.append(time.perf_counter() - began)
    if answer.status_code != 200:
        tally.wrong.append(f"{request.path} {answer.status_code}: {answer.text[:200]}")
    elif answer_content(request.path, answer.content) != request.expected:
        tally.differing[
            f"{request.path} {'stream' if request.body.get('stream') else 'whole'}"
        ] += 1
    else:
        tally.right += 1


async def _cancel_request(
    client: httpx2.AsyncClient, request: LoadRequest, share: float, tally: Tally
) -> None:
    """Send a request and disconnect, before the answer or in the middle of it. `share` is a random
    number from 0 to 1 that selects the moment.
    """
    tally.cancelled += 1
    try:
        async with (
            asyncio.timeout(share * 0.2),
            client.stream("POST", request.path, json=request.body) as answer,
        ):
            async for _ in answer.aiter_raw():
                if share < 0.3:
                    return
    except (TimeoutError, httpx2.HTTPError):
        pass


async def _expect_refusal(
    client: httpx2.AsyncClient, wrong_request: tuple[str, Any, int], tally: Tally
) -> None:
    path, body, status = wrong_request
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]  # only a string on ollama's paths
    as_expected = answer.status_code == status and bool(
        error if isinstance(error, str) else error["message"]
    )
    tally.refused += as_expected
    if not as_expected:
        tally.wrong.append(
            f"{path} {content[:60]!r}: {answer.status_code} instead of {status}: {answer.text[:200]}"
        )


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB, from /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def slope(values: list[float]) -> tuple[float, float]:
    """Fit a line by least squares; return its growth from the first to the last value, and the
    standard error of this growth.
    """
    count = len(values)
    if count < 3:
        return 0.0, 0.0
    center, mean = (count - 1) / 2, statistics.fmean(values)
    spread = sum((index - center) ** 2 for index in range(count))
    rate = sum((index - center) * (value - mean) for index, value in enumerate(values)) / spread
    residuals = sum(
        (value - mean - rate * (index - center)) ** 2 for index, value in enumerate(values)
    )
    return rate * count, (residuals / (count - 2) / spread) ** 0.5 * count


def growth(memory: list[float], requests: int) -> tuple[str, float, float]:
    """Return the verdict ("flat", GROWS or TOO_SHORT), the growth in MiB over the second half of
    `memory`, and its standard error. `requests`: number of requests of the run.
    """
    middle, three_quarters = len(memory) // 2, len(memory) * 3 // 4
    growth_mib, error = slope(memory[middle:])
    if growth_mib <= max(MAX_GROWTH_MIB, 2 * error):
        return "flat", growth_mib, error
    quarters = (slope(memory[middle:three_quarters]), slope(memory[three_quarters:]))
    both_grow = all(quarter > max(MAX_GROWTH_MIB / 2, 2 * noise) for quarter, noise in quarters)
    return GROWS if both_grow and requests >= MIN_REQUESTS else TOO_SHORT, growth_mib, error


async def wait_until_idle(url: str) -> dict[str, Any]:
    """Wait until no request runs or waits. Return the server's checked report of its cells, with a
    list of all gauges that are not zero as "gauges".
    """
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
                if n_open := (await client.get("/health")).json()["open"]:
                    report["gauges"].append(f"open {n_open}")
                return report
            await asyncio.sleep(0.05)


def main() -> int:
    """Parse the flags, start the server, send the load and print; return the exit code."""
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
    args, flags = parser.parse_known_args()
    words = [sys.executable, "-m", "llmcli.app", "serve", args.ref, "--port", "0", "--json"]
    words += ([] if args.loose else ["--reproducible"]) + [word for word in flags if word != "--"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        began = time.monotonic()
        tally = asyncio.run(
            send_load(
                ready["url"],
                requests_of_every_kind(not args.base),
                args.requests,
                args.cancelled,
                args.wrong,
                args.at_once,
                args.seed,
                ready["pid"],
            )
        )
        seconds, report = time.monotonic() - began, asyncio.run(wait_until_idle(ready["url"]))
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    return print_result(args, tally, seconds, report, code)


def print_result(
    args: argparse.Namespace, tally: Tally, seconds: float, report: dict[str, Any], code: int
) -> int:
    """Print the result; return 1 if a check failed. `report` is of `wait_until_idle`, `code` the
    server's exit code.
    """
    print(
        f"{args.requests} requests in {seconds:.0f} s, {args.at_once} at once: {tally.right} right, "
        f"{tally.cancelled} cancelled by their client, {tally.refused} wrong ones refused, {tally.busy} asked to retry, "
        f"{sum(tally.differing.values())} with another text, {len(tally.wrong)} answered wrongly"
    )
    for words in [
        *tally.wrong[:20],
        *(f"another text: {count} of {kind}" for kind, count in tally.differing.items()),
    ]:
        print("  " + words)
    running = [sequence for sequence in report["sequences"] if sequence["state"] == "running"]
    running += report["gauges"]
    print(
        f"idle: {len(running)} sequences and gauges of answers left, {report['used_cells']} of {report['cells']} "
        f"cells kept for prefixes, cell count right; SIGTERM: exit {code}"
    )
    verdict, growth_mib, error = growth(tally.memory, args.requests)
    print(
        f"memory: {tally.memory[0]:.1f} MiB at the start, {tally.memory[-1]:.1f} at the end; over the second half "
        f"{growth_mib:+.2f} ± {error:.2f} MiB: {verdict}"
    )
    ordered = sorted(tally.seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
    print(
        f"time of an answer: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, longest {ordered[-1] * 1e3:.0f} ms"
    )
    differ = sum(tally.differing.values()) if not args.loose else 0
    return int(bool(tally.wrong or differ or running or code or verdict == GROWS))


if __name__ == "__main__":
    raise SystemExit(main())
