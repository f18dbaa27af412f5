"""The engine's thread counts as stuck only after the limit of its pass, on a clock of its own."""

import asyncio
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.engine_watch import EngineStuck, EngineWatch
from llmcli.serve.processes import asgi_relay
from tests.fixtures.fakes import FakeContext, fake_runner

GREEDY = default_sampling().with_values({"temp": 0})


class Clock:
    """Replaces `time.monotonic`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def bridge_in_a_pass(
    monkeypatch: pytest.MonkeyPatch, row_seconds: float
) -> Iterator[tuple[EngineBridge, Clock]]:
    """Yield a bridge whose engine's thread is in a pass of 512 rows, and a clock."""
    clock, reached, go_on = Clock(), threading.Event(), threading.Event()
    monkeypatch.setattr("llmcli.serve.engine_thread.engine_watch.time.monotonic", clock)
    context = FakeContext(n_ctx=2048, n_batch=512)

    def wait(number: int) -> None:
        if number == 0:
            reached.set()
            assert go_on.wait(60)

    context.before = wait
    runner = fake_runner(context=context)
    runner.engine.scheduler.prefill.row_seconds = row_seconds

    async def ask(bridge: EngineBridge) -> None:
        pending = bridge.answer(Request(tuple(b"x" * 900), GREEDY, 2))
        await asyncio.to_thread(reached.wait, 60)
        await pending.aclose()

    with closing(EngineBridge(runner)) as bridge:
        bridge.check_responsive()
        asyncio.run(ask(bridge))
        try:
            yield bridge, clock
        finally:
            go_on.set()


@pytest.mark.parametrize("row_seconds", [0.0, 2.0])
def test_a_pass_at_half_a_token_per_second_is_no_reason_for_a_restart(
    monkeypatch: pytest.MonkeyPatch, row_seconds: float
) -> None:
    with bridge_in_a_pass(monkeypatch, row_seconds) as (bridge, clock):
        clock.seconds = 512 * 2.0  # the pass needs this long
        bridge.check_responsive()
        clock.seconds *= 6
        with pytest.raises(EngineStuck, match="working on 512 rows for 6144 s"):
            bridge.check_responsive()


def test_a_fast_model_is_soon_found_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    with bridge_in_a_pass(monkeypatch, row_seconds=1e-3) as (bridge, clock):
        clock.seconds = 115
        bridge.check_responsive()
        clock.seconds = 125
        with pytest.raises(EngineStuck):
            bridge.check_responsive()


def test_the_rows_of_an_earlier_pass_do_not_prolong_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("llmcli.serve.engine_thread.engine_watch.time.monotonic", clock)
    engine = fake_runner(context=FakeContext(n_ctx=2048, n_batch=512)).engine
    engine.scheduler.prefill.row_seconds = 2.0
    watch = EngineWatch(engine)
    watch.begin()
    engine.submit(Request(tuple(b"x" * 900), GREEDY, 2))
    engine.step()
    clock.seconds += 1024  # the pass took this long, and the step has not ended yet
    watch.check()
    watch.begin()  # a function that computes no pass
    clock.seconds += 130
    with pytest.raises(EngineStuck, match="working on no rows for 130 s"):
        watch.check()


def test_an_engine_that_waits_for_requests_is_never_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("llmcli.serve.engine_thread.engine_watch.time.monotonic", clock)
    with closing(EngineBridge(fake_runner())) as bridge:

        async def work() -> None:
            await bridge.run_on_engine_thread(lambda: None)

        asyncio.run(work())
        clock.seconds = 1e9
        for _ in range(1000):  # until the thread waits again
            try:
                bridge.check_responsive()
                break
            except EngineStuck:
                threading.Event().wait(0.01)
        bridge.check_responsive()


class Writer:
    """Collects the kinds of the frames that are sent. Each takes 500 s on the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.kinds = clock, list[str]()

    def write(self, frame: bytes) -> None:
        kind, *_ = asgi_relay.marshal.loads(frame[struct.calcsize("<I") :])
        self.kinds.append(kind)
        self.clock.seconds += 500


def test_heartbeats_go_on_during_a_long_pass_and_end_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi_relay, "HEARTBEAT_SECONDS", 0.0)
    with bridge_in_a_pass(monkeypatch, row_seconds=2.0) as (bridge, clock):
        writer: Any = Writer(clock)
        asyncio.run(asgi_relay._send_heartbeats(bridge, writer))
        beats = writer.kinds.count("beat")
        assert writer.kinds == [*["beat"] * beats, "stuck"]
        assert 500 * beats > 1024
