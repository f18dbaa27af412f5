"""Tokens gathered for the event loop: what waits, and what never does."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing
from itertools import count
from typing import Any

import pytest

from llmcli.api.errors import Failed
from llmcli.errors import UserError
from llmcli.runtime.binding.batch import Rows
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import defaults
from llmcli.serve.engine_thread import event_batching
from llmcli.serve.engine_thread.bridge import Answering, Bridge
from llmcli.serve.engine_thread.event_batching import Gathering, Told
from llmcli.types import Event
from tests.fixtures.fakes import fake_runner

OVER: Any = object()  # an answer that nobody looks into


class Loop:
    """Does at once what it is asked."""

    calls = 0

    def call_soon_threadsafe(self, function: Callable[[], None]) -> None:
        self.calls += 1
        function()


class Reader:
    def __init__(self, loop: Loop) -> None:
        self.loop, self.texts = loop, list[str]()

    def take(self, told: list[Told]) -> None:
        self.texts.append("".join(one.event.text for one in told))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(event_batching.time, "perf_counter", lambda: clock[0])
    return clock


def event(text: str) -> Event:
    return Event(0, 1, text)


@pytest.mark.parametrize(
    ("every", "spent", "texts"),
    [
        (0.025, 0.010, ["a", "bc", "de"]),
        (0.035, 0.010, ["a", "bcd", "e"]),
        (0.033, 0.040, ["a", "b", "c", "d", "e"]),
        (0, 0.0001, ["a", "b", "c", "d", "e"]),
    ],
)
def test_the_first_token_goes_at_once_and_those_behind_it_as_often_as_was_asked(
    now: list[float], every: float, spent: float, texts: list[str]
) -> None:
    held, reader = Gathering(every), Reader(Loop())
    for text in "abcde":
        held.add(reader, event(text), None)
        if held.due(spent):
            held.hand_over()
        now[0] += spent
    held.hand_over()
    assert reader.texts == texts


def test_an_end_never_waits(now: list[float]) -> None:
    held, reader = Gathering(10), Reader(Loop())
    held.add(reader, event("a"), None)
    held.hand_over()
    held.add(reader, event("b"), None)
    assert not held.due(0.010)
    held.add(reader, event("c"), OVER)
    assert held.due(0.010)
    held.hand_over()
    assert reader.texts == ["a", "bc"]
    held.add(reader, event("d"), None)  # of another sample: it may be its first
    assert held.due(0.010)


def test_whoever_begins_takes_the_others_along_in_one_call(now: list[float]) -> None:
    loop, held = Loop(), Gathering(10)
    old, new = Reader(loop), Reader(loop)
    held.add(old, event("a"), None)
    held.hand_over()
    held.add(old, event("b"), None)
    assert not held.due(0)
    held.add(new, event("x"), None)
    assert held.due(0)
    held.hand_over()
    assert (old.texts, new.texts, loop.calls) == (["a", "b"], ["x"], 2)


def test_who_reads_no_more_gets_nothing_more(now: list[float]) -> None:
    held, reader = Gathering(10), Reader(Loop())
    held.add(reader, event("a"), None)
    held.forget(reader)
    assert not held.due(99)
    held.hand_over()
    assert reader.texts == []


def test_the_bridge_tells_the_first_token_then_what_was_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    take = Answering.take

    def noted(self: Answering, told: list[Told]) -> None:
        taken.append(len(told))
        take(self, told)

    monkeypatch.setattr(Answering, "take", noted)
    request = Request(tuple(b"ask"), defaults().with_values({"temp": 0}))

    async def use(bridge: Bridge) -> str:
        async with aclosing(bridge.answer(request)) as answering:
            return "".join([event.text async for event in answering])

    with closing(Bridge(fake_runner(n_seq_max=3, n_ctx=512), every=60)) as bridge:
        assert asyncio.run(use(bridge)) == "hello"
    assert taken[0] == 1
    assert len(taken) == 2


def test_what_was_gathered_is_read_before_the_failure_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, passes = fake_runner(n_seq_max=3, n_ctx=512), count()
    decode = runner.context.decode

    def fails(rows: Rows) -> Any:
        if next(passes) == 3:
            raise UserError("no memory for that", hint="none")
        return decode(rows)

    monkeypatch.setattr(runner.context, "decode", fails)
    request, read = Request(tuple(b"ask"), defaults().with_values({"temp": 0})), list[str]()

    async def use(bridge: Bridge) -> None:
        async with aclosing(bridge.answer(request)) as answering:
            async for event in answering:
                read.append(event.text)

    with closing(Bridge(runner, every=60)) as bridge, pytest.raises(Failed, match="no memory"):
        asyncio.run(use(bridge))
    assert "".join(read) == "hel"
