"""The bridge: coroutines send requests, one thread answers."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, closing
from functools import partial
from typing import Any

import pytest

from llmcli.api.errors import ApiError, ServerBusy, ServerStopping
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.serve.engine_thread.bridge import EngineBridge
from tests.fixtures.fakes import fake_runner

GREEDY = default_sampling().with_values({"temp": 0})


def request(text: str = "ask", **more: Any) -> Request:
    return Request(tuple(text.encode()), GREEDY, **more)


def run(
    use: Callable[[EngineBridge], Coroutine[Any, Any, Any]],
    waiting: int = 64,
    parallel: int = 2,
    **fake: Any,
) -> EngineBridge:
    with closing(
        EngineBridge(fake_runner(**{"n_seq_max": 3, "n_ctx": 512, **fake}), parallel, waiting)
    ) as bridge:
        asyncio.run(use(bridge))
    bridge.runner.engine.ledger.check()
    assert not bridge.runner.engine.is_busy
    assert bridge.n_open == 0
    return bridge


async def said(bridge: EngineBridge, one: Request, samples: int = 1) -> list[str]:
    texts = [""] * samples
    async with aclosing(bridge.answer(one, samples=samples)) as answering:
        async for event in answering:
            texts[event.sequence] += event.text
    assert [answer.text for answer in answering.answers] == texts
    return texts


def test_many_coroutines_get_their_own_answers() -> None:
    async def use(bridge: EngineBridge) -> None:
        found = await asyncio.gather(*(said(bridge, request(f"number {n}")) for n in range(10)))
        assert found == [["hello"]] * 10

    run(use)


def test_samples_are_told_apart_by_their_number() -> None:
    async def use(bridge: EngineBridge) -> None:
        assert await said(bridge, request(), 3) == ["hello"] * 3

    run(use)


def test_several_requests_can_be_one_answering() -> None:
    async def use(bridge: EngineBridge) -> None:
        async with aclosing(
            bridge.answer(request("one"), request("other"), samples=2)
        ) as answering:
            numbers = {event.sequence async for event in answering}
        assert numbers == {0, 1, 2, 3}
        assert [answer.prompt_tokens for answer in answering.answers] == [3, 3, 5, 5]

    run(use)


def test_whoever_stops_reading_frees_the_engine_and_the_others_go_on() -> None:
    async def use(bridge: EngineBridge) -> None:
        async with aclosing(bridge.answer(request(max_tokens=400, ignore_eos=True))) as left:
            async for _ in left:
                break
        assert await said(bridge, request("another")) == ["hello"]
        assert await bridge.run_on_engine_thread(lambda: bridge.runner.engine.is_busy) is False

    run(use)


def test_a_request_that_waits_can_be_given_up() -> None:
    async def use(bridge: EngineBridge) -> None:
        long = [
            bridge.answer(request("a" * n, max_tokens=300, ignore_eos=True)) for n in range(1, 5)
        ]
        await long[3].aclose()
        await long[0].aclose()
        async for _ in long[1]:
            pass
        assert long[1].answers[0].finish == "length"
        await long[2].aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(long[2])

    run(use)


def test_a_full_queue_is_told_at_once_with_a_time_to_come_back() -> None:
    async def use(bridge: EngineBridge) -> None:
        open_ones = [
            bridge.answer(request("a" * n, max_tokens=200, ignore_eos=True)) for n in range(1, 4)
        ]
        with pytest.raises(ServerBusy) as busy:
            bridge.answer(request())
        assert busy.value.retry_after >= 1
        for one in open_ones:
            await one.aclose()
        await bridge.run_on_engine_thread(lambda: None)
        assert await said(bridge, request()) == ["hello"]

    run(use, waiting=1)


def test_the_time_to_come_back_counts_what_answers_waited_for_one_another_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes five seconds from its first pass to its last token, and up to twelve before."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def second(_: int) -> None:
        now[0] += 1.0

    async def use(bridge: EngineBridge) -> None:
        for _ in range(20):
            await asyncio.gather(*(said(bridge, request(f"number {n}")) for n in range(3)))
        long = [
            bridge.answer(request("a" * n, max_tokens=200, ignore_eos=True)) for n in range(1, 4)
        ]
        with pytest.raises(ServerBusy) as busy:
            bridge.answer(request())
        assert busy.value.retry_after == 15
        for one in long:
            await one.aclose()

    run(use, waiting=2, parallel=1, before=second, n_seq_max=1)


def test_functions_run_on_the_engines_thread_and_their_mistakes_come_back() -> None:
    def refuse(error: UserError) -> None:
        raise error

    async def use(bridge: EngineBridge) -> None:
        name = await bridge.run_on_engine_thread(
            lambda: __import__("threading").current_thread().name
        )
        assert name == "llmcli-engine"
        for error in (UserError("no"), ApiError("no")):
            with pytest.raises(type(error), match="no"):
                await bridge.run_on_engine_thread(partial(refuse, error))
        assert await bridge.run_on_engine_thread(lambda: "still there") == "still there"
        assert await bridge.run_in_worker(len, "abc") == 3

    run(use)


def test_draining_ends_what_runs_and_begins_nothing() -> None:
    async def use(bridge: EngineBridge) -> None:
        short = asyncio.ensure_future(said(bridge, request()))
        await asyncio.sleep(0)
        await bridge.drain(30)
        assert await short == ["hello"]
        with pytest.raises(ServerStopping):
            bridge.answer(request())

    run(use)


def test_what_does_not_end_while_draining_is_cancelled_and_told_why() -> None:
    async def use(bridge: EngineBridge) -> None:
        async with aclosing(
            bridge.answer(request(ignore_eos=True, allow_repetition=True))
        ) as answering:
            await anext(answering)
            await bridge.drain(0)
            with pytest.raises(ServerStopping):
                async for _ in answering:
                    pass

    run(use, n_ctx=100_000)


def test_a_bug_in_the_engine_reaches_whoever_waits_and_whoever_closes() -> None:
    def fail(number: int) -> None:
        raise ZeroDivisionError("a bug")

    async def use(bridge: EngineBridge) -> None:
        with pytest.raises(ZeroDivisionError):
            await said(bridge, request())
        with pytest.raises(ZeroDivisionError):
            bridge.answer(request())

        await asyncio.wait_for(bridge.drain(0), 10)  # nobody is left to wait for

    with pytest.raises(ZeroDivisionError):
        run(use, before=fail)
