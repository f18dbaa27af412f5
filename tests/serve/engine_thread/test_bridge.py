"""The engine bridge: coroutines submit requests, and one thread answers them."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, closing
from functools import partial
from typing import Any

import pytest

from llmcli.api.errors import AnswerFailed, ApiError, ServerBusy, ServerStopping
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies import plain, strategies
from llmcli.serve.engine_thread.bridge import EngineBridge
from tests.fixtures.fakes import FakeContext, fake_runner

GREEDY = default_sampling().with_values({"temp": 0})


def request(text: str = "ask", **more: Any) -> Request:
    return Request(tuple(text.encode()), GREEDY, **more)


def run(
    scenario: Callable[[EngineBridge], Coroutine[Any, Any, Any]],
    waiting: int = 64,
    parallel: int = 2,
    **fake: Any,
) -> EngineBridge:
    with closing(
        EngineBridge(fake_runner(**{"n_seq_max": 3, "n_ctx": 512, **fake}), parallel, waiting)
    ) as bridge:
        asyncio.run(scenario(bridge))
    bridge.runner.engine.ledger.check()
    assert not bridge.runner.engine.is_busy
    assert bridge.n_open == 0
    return bridge


async def answer_texts(bridge: EngineBridge, submitted: Request, samples: int = 1) -> list[str]:
    texts = [""] * samples
    async with aclosing(bridge.answer(submitted, samples=samples)) as pending:
        async for event in pending:
            texts[event.sequence] += event.text
    assert [answer.text for answer in pending.answers] == texts
    return texts


def test_many_coroutines_get_their_own_answers() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        texts = await asyncio.gather(
            *(answer_texts(bridge, request(f"number {n}")) for n in range(10))
        )
        assert texts == [["hello"]] * 10

    run(scenario)


def test_samples_have_consecutive_numbers() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        assert await answer_texts(bridge, request(), 3) == ["hello"] * 3

    run(scenario)


def test_several_requests_can_be_submitted_together() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        async with aclosing(bridge.answer(request("one"), request("other"), samples=2)) as pending:
            numbers = {event.sequence async for event in pending}
        assert numbers == {0, 1, 2, 3}
        assert [answer.prompt_tokens for answer in pending.answers] == [3, 3, 5, 5]

    run(scenario)


def test_a_reader_that_stops_frees_the_engine() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        async with aclosing(bridge.answer(request(max_tokens=400, ignore_eos=True))) as abandoned:
            async for _ in abandoned:
                break
        assert await answer_texts(bridge, request("another")) == ["hello"]
        assert await bridge.run_on_engine_thread(lambda: bridge.runner.engine.is_busy) is False

    run(scenario)


def test_a_reader_that_leaves_interrupts_its_pass() -> None:
    """The pass waits in its second micro-batch until the reader has left."""
    context = FakeContext(n_ctx=4096, n_seq_max=2, n_batch=2048, n_ubatch=64)
    reached, has_left = threading.Event(), threading.Event()

    def wait_for_reader(number: int) -> None:
        if number == 1:
            reached.set()
            assert has_left.wait(60)

    async def scenario(bridge: EngineBridge) -> None:
        context.before_micro_batch = wait_for_reader
        pending = bridge.answer(request("y" * 2000))
        await asyncio.to_thread(reached.wait, 60)
        await pending.aclose()
        has_left.set()
        assert await answer_texts(bridge, request("another")) == ["hello"]
        assert context.n_micro_batches < 10  # of 32 that the prompt has

    bridge = run(scenario, context=context)
    assert bridge.metrics._cancelled == 1


def test_a_waiting_request_can_be_cancelled() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        answers = [
            bridge.answer(request("a" * n, max_tokens=300, ignore_eos=True)) for n in range(1, 5)
        ]
        await answers[3].aclose()
        await answers[0].aclose()
        async for _ in answers[1]:
            pass
        assert answers[1].answers[0].finish == "length"
        await answers[2].aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(answers[2])

    run(scenario)


def test_a_full_queue_is_reported_with_retry_after() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        open_answers = [
            bridge.answer(request("a" * n, max_tokens=200, ignore_eos=True)) for n in range(1, 4)
        ]
        with pytest.raises(ServerBusy) as busy:
            bridge.answer(request())
        assert busy.value.retry_after >= 1
        for pending in open_answers:
            await pending.aclose()
        await bridge.run_on_engine_thread(lambda: None)
        assert await answer_texts(bridge, request()) == ["hello"]

    run(scenario, waiting=1)


def test_a_request_of_many_answers_locks_no_other_client_out() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        many = bridge.answer(request(client="much", max_tokens=200, ignore_eos=True), samples=128)
        with pytest.raises(ServerBusy):
            bridge.answer(request(client="much"))
        others = [request(client=client, max_tokens=5, ignore_eos=True) for client in "abc"]
        texts = await asyncio.gather(*(answer_texts(bridge, other) for other in others))
        assert [len(text) for (text,) in texts] == [5, 5, 5]
        assert bridge.n_open > 100, "the others did not wait for the answers of the first client"
        await many.aclose()

    run(scenario, waiting=16)


def test_retry_after_does_not_count_the_waiting_time_of_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer takes five seconds from its first pass to its last token, and waits up to twelve
    seconds before.
    """
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def second(_: int) -> None:
        now[0] += 1.0

    async def scenario(bridge: EngineBridge) -> None:
        for _ in range(20):
            await asyncio.gather(*(answer_texts(bridge, request(f"number {n}")) for n in range(3)))
        answers = [
            bridge.answer(request("a" * n, max_tokens=200, ignore_eos=True)) for n in range(1, 4)
        ]
        with pytest.raises(ServerBusy) as busy:
            bridge.answer(request())
        assert busy.value.retry_after == 15
        for pending in answers:
            await pending.aclose()

    run(scenario, waiting=2, parallel=1, before=second, n_seq_max=1)


def test_functions_run_on_the_engine_thread_and_raise_their_errors() -> None:
    def refuse(error: UserError) -> None:
        raise error

    async def scenario(bridge: EngineBridge) -> None:
        name = await bridge.run_on_engine_thread(
            lambda: __import__("threading").current_thread().name
        )
        assert name == "llmcli-engine"
        for error in (UserError("no"), ApiError("no")):
            with pytest.raises(type(error), match="no"):
                await bridge.run_on_engine_thread(partial(refuse, error))
        assert await bridge.run_on_engine_thread(lambda: "still there") == "still there"
        assert await bridge.run_in_worker(len, "abc") == 3

    run(scenario)


def test_drain_waits_for_running_answers_and_refuses_new_ones() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        short = asyncio.ensure_future(answer_texts(bridge, request()))
        await asyncio.sleep(0)
        await bridge.drain(30)
        assert await short == ["hello"]
        with pytest.raises(ServerStopping):
            bridge.answer(request())

    run(scenario)


def test_drain_cancels_answers_that_take_too_long() -> None:
    async def scenario(bridge: EngineBridge) -> None:
        async with aclosing(
            bridge.answer(request(ignore_eos=True, allow_repetition=True))
        ) as pending:
            await anext(pending)
            await bridge.drain(0)
            with pytest.raises(ServerStopping):
                async for _ in pending:
                    pass

    run(scenario, n_ctx=100_000)


def test_an_engine_error_is_raised_in_readers_and_in_close() -> None:
    def fail(number: int) -> None:
        raise ZeroDivisionError("a bug")

    async def scenario(bridge: EngineBridge) -> None:
        with pytest.raises(ZeroDivisionError):
            await answer_texts(bridge, request())
        with pytest.raises(ZeroDivisionError):
            bridge.answer(request())

        async with asyncio.timeout(10):  # returns although the engine is dead
            await bridge.drain(0)

    with pytest.raises(ZeroDivisionError):
        run(scenario, before=fail)


def test_a_bug_in_one_call_fails_only_that_call(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the function of another call nor the answers that run meanwhile are harmed."""

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def scenario(bridge: EngineBridge) -> None:
        running = asyncio.ensure_future(answer_texts(bridge, request()))
        with pytest.raises(ZeroDivisionError):
            await bridge.run_on_engine_thread(fail)
        assert await running == ["hello"]
        assert await bridge.run_on_engine_thread(lambda: "still there") == "still there"

    run(scenario)


def test_a_bug_in_a_strategy_fails_only_its_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = plain.PlainStrategy.accept

    def accept_or_fail(self: Any, sequence: Any, *rest: Any) -> Any:
        if sequence.request.tokens == tuple(b"broken") and len(sequence.times) == 2:
            raise IndexError("secret details")
        return accept(self, sequence, *rest)

    monkeypatch.setattr(plain.PlainStrategy, "accept", accept_or_fail)

    async def scenario(bridge: EngineBridge) -> None:
        async def broken() -> None:
            with pytest.raises(AnswerFailed, match="internal error; see the server's log"):
                await answer_texts(bridge, request("broken"))

        assert (await asyncio.gather(broken(), answer_texts(bridge, request())))[1] == ["hello"]

    run(scenario)
    assert "secret details" in caplog.text
    assert "accept_or_fail" in caplog.text


@pytest.mark.parametrize("failing_sample", [0, 1, 2])
def test_a_bug_in_a_submission_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, failing_sample: int
) -> None:
    made: list[int] = []

    def make(*args: Any) -> Any:
        if args[0].tokens == tuple(b"broken"):
            made.append(1)
            if len(made) == failing_sample + 1:
                raise KeyError("a bug")
        return plain.PlainStrategy(*args)

    monkeypatch.setitem(strategies(), "plain", make)

    async def scenario(bridge: EngineBridge) -> None:
        with pytest.raises(KeyError):
            await answer_texts(bridge, request("broken"), 3)
        assert await answer_texts(bridge, request()) == ["hello"]

    run(scenario)


def test_a_wrong_state_of_the_engine_ends_it() -> None:
    def wrong() -> None:
        raise AssertionError("the ledger is wrong")

    async def scenario(bridge: EngineBridge) -> None:
        with pytest.raises(AssertionError, match="the ledger is wrong"):
            await bridge.run_on_engine_thread(wrong, is_vital=True)
        async with asyncio.timeout(10):
            await bridge.drain(0)
        with pytest.raises(AssertionError):
            await answer_texts(bridge, request())

    with pytest.raises(AssertionError, match="the ledger is wrong"):
        run(scenario)
