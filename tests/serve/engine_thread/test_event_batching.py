"""Events are batched for the event loop, except the first and the last event of an answer."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing
from itertools import count
from typing import Any

import pytest

from llmcli.api.errors import AnswerFailed
from llmcli.errors import UserError
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.serve.engine_thread import event_batching
from llmcli.serve.engine_thread.bridge import EngineBridge, PendingAnswers
from llmcli.serve.engine_thread.event_batching import AnswerEvent, EventBatcher
from llmcli.types import Event
from tests.fixtures.fakes import fake_runner

FINISHED: Any = object()  # stands for a finished answer


class Loop:
    """An event loop that runs functions at once."""

    calls = 0

    def call_soon_threadsafe(self, function: Callable[[], None]) -> None:
        self.calls += 1
        function()


class Reader:
    def __init__(self, loop: Loop) -> None:
        self.loop, self.texts = loop, list[str]()

    def deliver(self, events: list[AnswerEvent]) -> None:
        self.texts.append("".join(answer_event.event.text for answer_event in events))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(event_batching.time, "perf_counter", lambda: clock[0])
    return clock


def event(text: str) -> Event:
    return Event(0, 1, text)


@pytest.mark.parametrize(
    ("window", "step_seconds", "texts"),
    [
        (0.025, 0.010, ["a", "bc", "de"]),
        (0.035, 0.010, ["a", "bcd", "e"]),
        (0.033, 0.040, ["a", "b", "c", "d", "e"]),
        (0, 0.0001, ["a", "b", "c", "d", "e"]),
    ],
)
def test_the_first_token_is_delivered_at_once_and_later_ones_in_batches(
    now: list[float], window: float, step_seconds: float, texts: list[str]
) -> None:
    batcher, reader = EventBatcher(window), Reader(Loop())
    for text in "abcde":
        batcher.add(reader, event(text), None)
        if batcher.is_due(step_seconds):
            batcher.flush()
        now[0] += step_seconds
    batcher.flush()
    assert reader.texts == texts


def test_the_last_event_is_delivered_at_once(now: list[float]) -> None:
    batcher, reader = EventBatcher(10), Reader(Loop())
    batcher.add(reader, event("a"), None)
    batcher.flush()
    batcher.add(reader, event("b"), None)
    assert not batcher.is_due(0.010)
    batcher.add(reader, event("c"), FINISHED)
    assert batcher.is_due(0.010)
    batcher.flush()
    assert reader.texts == ["a", "bc"]
    batcher.add(reader, event("d"), None)  # may be the first token of another sample
    assert batcher.is_due(0.010)


def test_a_first_token_flushes_all_readers_in_one_call(now: list[float]) -> None:
    loop, batcher = Loop(), EventBatcher(10)
    first_reader, second_reader = Reader(loop), Reader(loop)
    batcher.add(first_reader, event("a"), None)
    batcher.flush()
    batcher.add(first_reader, event("b"), None)
    assert not batcher.is_due(0)
    batcher.add(second_reader, event("x"), None)
    assert batcher.is_due(0)
    batcher.flush()
    assert (first_reader.texts, second_reader.texts, loop.calls) == (["a", "b"], ["x"], 2)


def test_a_dropped_reader_gets_no_events(now: list[float]) -> None:
    batcher, reader = EventBatcher(10), Reader(Loop())
    batcher.add(reader, event("a"), None)
    batcher.drop(reader)
    assert not batcher.is_due(99)
    batcher.flush()
    assert reader.texts == []


def test_the_bridge_delivers_the_first_token_then_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch_sizes: list[int] = []
    deliver = PendingAnswers.deliver

    def record_deliver(self: PendingAnswers, events: list[AnswerEvent]) -> None:
        batch_sizes.append(len(events))
        deliver(self, events)

    monkeypatch.setattr(PendingAnswers, "deliver", record_deliver)
    request = Request(tuple(b"ask"), default_sampling().with_values({"temp": 0}))

    async def scenario(bridge: EngineBridge) -> str:
        async with aclosing(bridge.answer(request)) as pending:
            return "".join([event.text async for event in pending])

    with closing(EngineBridge(fake_runner(n_seq_max=3, n_ctx=512), batch_seconds=60)) as bridge:
        assert asyncio.run(scenario(bridge)) == "hello"
    assert batch_sizes[0] == 1
    assert len(batch_sizes) == 2


def test_held_events_are_delivered_before_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, passes = fake_runner(n_seq_max=3, n_ctx=512), count()
    decode = runner.context.decode

    def fails(rows: BatchRows) -> Any:
        if next(passes) == 3:
            raise UserError("no memory for that", hint="none")
        return decode(rows)

    monkeypatch.setattr(runner.context, "decode", fails)
    request, texts = (
        Request(tuple(b"ask"), default_sampling().with_values({"temp": 0})),
        list[str](),
    )

    async def scenario(bridge: EngineBridge) -> None:
        async with aclosing(bridge.answer(request)) as pending:
            async for event in pending:
                texts.append(event.text)

    with (
        closing(EngineBridge(runner, batch_seconds=60)) as bridge,
        pytest.raises(AnswerFailed, match="no memory"),
    ):
        asyncio.run(scenario(bridge))
    assert "".join(texts) == "hel"
