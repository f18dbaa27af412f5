"""Tokens are grouped for the event loop: which events wait, and which never do."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing
from itertools import count
from typing import Any

import pytest

from llmcli.api.errors import AnswerFailed
from llmcli.errors import UserError
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.serve.engine_thread import event_batching
from llmcli.serve.engine_thread.bridge import EngineBridge, PendingAnswers
from llmcli.serve.engine_thread.event_batching import AnswerEvent, EventBatcher
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

    def deliver(self, told: list[AnswerEvent]) -> None:
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
    held, reader = EventBatcher(every), Reader(Loop())
    for text in "abcde":
        held.add(reader, event(text), None)
        if held.is_due(spent):
            held.flush()
        now[0] += spent
    held.flush()
    assert reader.texts == texts


def test_an_end_never_waits(now: list[float]) -> None:
    held, reader = EventBatcher(10), Reader(Loop())
    held.add(reader, event("a"), None)
    held.flush()
    held.add(reader, event("b"), None)
    assert not held.is_due(0.010)
    held.add(reader, event("c"), OVER)
    assert held.is_due(0.010)
    held.flush()
    assert reader.texts == ["a", "bc"]
    held.add(reader, event("d"), None)  # of another sample: it may be its first
    assert held.is_due(0.010)


def test_whoever_begins_takes_the_others_along_in_one_call(now: list[float]) -> None:
    loop, held = Loop(), EventBatcher(10)
    old, new = Reader(loop), Reader(loop)
    held.add(old, event("a"), None)
    held.flush()
    held.add(old, event("b"), None)
    assert not held.is_due(0)
    held.add(new, event("x"), None)
    assert held.is_due(0)
    held.flush()
    assert (old.texts, new.texts, loop.calls) == (["a", "b"], ["x"], 2)


def test_who_reads_no_more_gets_nothing_more(now: list[float]) -> None:
    held, reader = EventBatcher(10), Reader(Loop())
    held.add(reader, event("a"), None)
    held.drop(reader)
    assert not held.is_due(99)
    held.flush()
    assert reader.texts == []


def test_the_bridge_tells_the_first_token_then_what_was_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    take = PendingAnswers.deliver

    def noted(self: PendingAnswers, told: list[AnswerEvent]) -> None:
        taken.append(len(told))
        take(self, told)

    monkeypatch.setattr(PendingAnswers, "deliver", noted)
    request = Request(tuple(b"ask"), default_sampling().with_values({"temp": 0}))

    async def use(bridge: EngineBridge) -> str:
        async with aclosing(bridge.answer(request)) as answering:
            return "".join([event.text async for event in answering])

    with closing(EngineBridge(fake_runner(n_seq_max=3, n_ctx=512), batch_seconds=60)) as bridge:
        assert asyncio.run(use(bridge)) == "hello"
    assert taken[0] == 1
    assert len(taken) == 2


def test_what_was_gathered_is_read_before_the_failure_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, passes = fake_runner(n_seq_max=3, n_ctx=512), count()
    decode = runner.context.decode

    def fails(rows: BatchRows) -> Any:
        if next(passes) == 3:
            raise UserError("no memory for that", hint="none")
        return decode(rows)

    monkeypatch.setattr(runner.context, "decode", fails)
    request, read = Request(tuple(b"ask"), default_sampling().with_values({"temp": 0})), list[str]()

    async def use(bridge: EngineBridge) -> None:
        async with aclosing(bridge.answer(request)) as answering:
            async for event in answering:
                read.append(event.text)

    with (
        closing(EngineBridge(runner, batch_seconds=60)) as bridge,
        pytest.raises(AnswerFailed, match="no memory"),
    ):
        asyncio.run(use(bridge))
    assert "".join(read) == "hel"
