"""Load on a server during an event, such as a killed process, with a count of the outcomes. Used by
kill_replica.py and rpc_workers.py.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohttp


async def load(
    url: str,
    requests: int,
    clients: int,
    tokens: int,
    event: Callable[[], Awaitable[None]],
    samples: int = 1,
) -> Counter[str]:
    """Send `requests` requests for `samples` answers each from `clients` clients at the same time,
    and run `event` after a third of them. Return the number of requests by outcome (see `ask`).

    At the end, `clients` more requests are sent. "after" counts how many of them are answered
    completely.
    """
    counts: Counter[str] = Counter(whole=0, told=0, failed=0, lost=0)
    numbers = iter(range(requests))
    event_started = asyncio.Event()

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            if number == requests // 3 and not event_started.is_set():
                event_started.set()
                events.append(asyncio.create_task(event()))
            counts[await ask(session, url, number, tokens, samples)] += 1

    events: list[asyncio.Task[None]] = []
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
        await asyncio.gather(*events)
        final_outcomes = [
            await ask(session, url, number, tokens, samples) for number in range(clients)
        ]
        counts["after"] = final_outcomes.count("whole")
    return counts


async def ask(
    session: aiohttp.ClientSession, url: str, number: int, tokens: int, samples: int = 1
) -> str:
    """Send one chat request, as a stream if `number` is even, and return its outcome.

    The outcome is "whole" (complete), "told" (an error event in the stream), "failed" (an error
    status) or "lost" (neither a complete answer nor an error).
    """
    stream = number % 2 == 0
    messages = [
        {"role": "system", "content": f"You are number {number % 5}."},
        {"role": "user", "content": "Count."},
    ]
    body = {"messages": messages, "max_tokens": tokens, "stream": stream, "n": samples}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            text = await response.text()
    except aiohttp.ClientError as error:
        print(f"request {number}: {error!r}")
        return "lost"
    if response.status != 200:
        print(f"request {number}: {response.status} {text[:200]}")
        return "failed"
    if not stream:
        return _verdict(text, complete_indexes([json.loads(text)]) == set(range(samples)))
    events = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
    ]
    if events and events[-1] == "[DONE]":
        return _verdict(text, complete_indexes(map(json.loads, events[:-1])) == set(range(samples)))
    return "told" if events and "error" in json.loads(events[-1]) else _verdict(text, False)


def complete_indexes(documents: Iterable[Any]) -> set[int]:
    """Return the indexes of the choices that have a regular finish reason in the JSON documents of
    one response.
    """
    choices = [choice for document in documents for choice in document.get("choices", ())]
    return {choice["index"] for choice in choices if choice["finish_reason"] in ("stop", "length")}


def _verdict(text: str, complete: bool) -> str:
    if not complete:
        print(f"no whole answer: {text[-400:]!r}")
    return "whole" if complete else "lost"


def print_counts(counts: Counter[str]) -> bool:
    """Print the counts of `load`; return whether no request was lost and the server answered at
    least one request after the event.
    """
    print(json.dumps(counts))
    return not counts["lost"] and counts["after"] > 0
