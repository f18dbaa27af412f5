"""Load on a server while an event happens, with a count of the outcomes (kill_replica.py,
rpc_workers.py).
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
    """Send requests for `samples` answers each, run `event` after a third of them, and count the
    outcomes.

    "after" counts `clients` more requests that were answered completely at the end.
    """
    counted: Counter[str] = Counter(whole=0, told=0, failed=0, lost=0)
    numbers = iter(range(requests))
    happened = asyncio.Event()

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            if number == requests // 3 and not happened.is_set():
                happened.set()
                events.append(asyncio.create_task(event()))
            counted[await ask(session, url, number, tokens, samples)] += 1

    events: list[asyncio.Task[None]] = []
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
        await asyncio.gather(*events)
        after = [await ask(session, url, number, tokens, samples) for number in range(clients)]
        counted["after"] = after.count("whole")
    return counted


async def ask(
    session: aiohttp.ClientSession, url: str, number: int, tokens: int, samples: int = 1
) -> str:
    """Send one request; return "whole", "told" (error event in its stream), "failed" (status) or
    "lost".
    """
    stream = number % 2 == 0
    said = [
        {"role": "system", "content": f"You are number {number % 5}."},
        {"role": "user", "content": "Count."},
    ]
    body = {"messages": said, "max_tokens": tokens, "stream": stream, "n": samples}
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
        return _whole(text, ended([json.loads(text)]) == set(range(samples)))
    events = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
    ]
    if events and events[-1] == "[DONE]":
        return _whole(text, ended(map(json.loads, events[:-1])) == set(range(samples)))
    return "told" if events and "error" in json.loads(events[-1]) else _whole(text, False)


def ended(documents: Iterable[Any]) -> set[int]:
    """Return the indexes of the answers that are complete in a response's documents."""
    choices = [choice for document in documents for choice in document.get("choices", ())]
    return {choice["index"] for choice in choices if choice["finish_reason"] in ("stop", "length")}


def _whole(text: str, whole: bool) -> str:
    if not whole:
        print(f"no whole answer: {text[-400:]!r}")
    return "whole" if whole else "lost"


def told(counted: Counter[str]) -> bool:
    """Print the counts; return whether no request was lost and the server still answers."""
    print(json.dumps(counted))
    return not counted["lost"] and counted["after"] > 0
