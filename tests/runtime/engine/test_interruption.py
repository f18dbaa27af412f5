"""A cancelled request frees the engine within a micro-batch, and costs others only rows that are
computed again.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmcli.runtime.binding.contexts.context import Aborted, Context
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.rows.batch import abort_callback
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.interruption import RunningPass, is_worth_interrupting
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})


def request(text: str, **more: object) -> Request:
    return Request(tuple(text.encode()), GREEDY, **more)


@pytest.mark.parametrize(
    ("cancelled", "others", "row_seconds", "is_interrupted"),
    [
        (0, 0, 0.0, False),
        (500, 12, 0.0, True),
        (500, 12, 1e-3, True),
        (500, 12, 1e-5, False),  # it ends in 5 ms
        (256, 256, 1e-3, True),
        (255, 256, 1.0, False),  # more work of others would be lost
        (4, 2, 2.0, True),  # a slow model
        (1, 0, 2.0, True),
    ],
)
def test_a_pass_is_interrupted_if_that_saves_time_and_loses_less(
    cancelled: int, others: int, row_seconds: float, is_interrupted: bool
) -> None:
    assert is_worth_interrupting(RunningPass(cancelled, others, row_seconds)) == is_interrupted


def test_after_a_cancellation_the_engine_is_free_within_one_micro_batch() -> None:
    context = FakeContext(n_ctx=2048, n_seq_max=2, n_batch=512, n_ubatch=64)
    engine = Engine(context, FakeModel(), None, schedule=Schedule(2))
    number = engine.submit(request("y" * 1000))
    context.before_micro_batch = lambda at: engine.cancel(number) if at == 2 else None
    engine.step()
    assert context.n_micro_batches == 3  # the third was computed to its end
    engine.check()
    events = engine.step()
    assert [event.finish for event in events] == ["cancelled"]
    assert not engine.is_busy
    context.before_micro_batch = lambda at: None
    following = engine.submit(request("z" * 100))
    while engine.is_busy:
        engine.step()
        engine.check()
    assert engine.pop_answer(following).text == "hello"


def test_two_cancelled_requests_count_together() -> None:
    context = FakeContext(n_ctx=2048, n_seq_max=3, n_batch=512, n_ubatch=64)
    engine = Engine(context, FakeModel(), None, schedule=Schedule(3, max_chunk_rows=200))
    leaving = [engine.submit(request(name * 900)) for name in "ab"]
    staying = engine.submit(request("c" * 900))
    context.before_micro_batch = lambda at: engine.cancel(*leaving) if at == 1 else None
    engine.step()
    assert context.n_micro_batches == 2
    while engine.is_busy:
        engine.step()
        engine.check()
    assert engine.pop_answer(staying).text == "hello"


def test_a_pass_in_which_others_have_more_rows_is_not_interrupted() -> None:
    context = FakeContext(n_ctx=2048, n_seq_max=2, n_batch=512, n_ubatch=64)
    engine = Engine(context, FakeModel(), None, schedule=Schedule(2))
    leaving, staying = engine.submit(request("a" * 100)), engine.submit(request("b" * 300))
    context.before_micro_batch = lambda at: engine.cancel(leaving) if at == 1 else None
    engine.step()
    assert engine.stats.prompt_tokens == sum(context.batches) > 200  # the pass was completed
    while engine.is_busy:
        engine.step()
        engine.check()
    assert engine.pop_answer(staying).text == "hello"
    assert sum(context.batches) <= 400 + 5  # no token was computed twice


def test_a_request_cancelled_between_planning_and_computing_is_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = FakeContext(n_ctx=2048, n_batch=512)
    engine = Engine(context, FakeModel(), None, schedule=Schedule(1))
    number = engine.submit(request("y" * 1000))
    next_pass = engine.scheduler.next_pass

    def plan_and_cancel() -> object:
        plan = next_pass()
        engine.cancel(number)
        return plan

    monkeypatch.setattr(engine.scheduler, "next_pass", plan_and_cancel)
    engine.step()
    assert not context.batches
    assert [event.finish for event in engine.step()] == ["cancelled"]


def answer_of(runner: Runner, number: int) -> Answer:
    while runner.engine.is_busy:
        runner.engine.step()
        runner.engine.check()
    return runner.engine.pop_answer(number)


@contextmanager
def calling_at_node(context: Context, number: int, action: Callable[[], None]) -> Iterator[None]:
    """In the block, call `action` at a node of the graphs of a pass, counted from 1; with 0, never.
    llama.cpp asks after each node whether to stop.
    """
    asked = 0

    def ask(data: object) -> bool:
        nonlocal asked
        asked += 1
        if asked == number:
            action()
        return bool(context.stop.flag.value)

    callback = lib().ggml_abort_callback(ask)
    lib().llama_set_abort_callback(context.pointer, callback, None)
    try:
        yield
    finally:
        lib().llama_set_abort_callback(context.pointer, *abort_callback(context.stop.flag))
        assert asked >= number, "the pass has fewer nodes"


@pytest.mark.parametrize("node", [None, 1, 2, 60, 150, 300, 500])
def test_an_aborted_pass_leaves_the_cells_of_other_answers_as_they_were(
    stories_gguf: Path, node: int | None
) -> None:
    """llama.cpp aborts the pass before it begins (None), or at a node of its graphs. Whatever it
    had computed by then, the other answers have the tokens that they have alone.
    """
    rng = random.Random(4)
    options = RunOptions(ctx_size=1024, threads=1, threads_batch=1, batch_size=512, ubatch_size=32)
    prompts = [tuple(rng.choices(range(3, 500), k=length)) for length in (60, 40, 300)]
    with open_runner(stories_gguf, options, slots=4) as runner:
        engine, context = runner.engine, runner.context
        decoding, prefilling, leaving = (
            Request(tokens, GREEDY, 24, ignore_eos=True) for tokens in prompts
        )
        expected = []
        for each in (decoding, prefilling):
            answer = answer_of(runner, engine.submit(each))
            expected.append([token.id for token in answer.tokens])
        engine.ledger.evict_idle()
        first = engine.submit(decoding)
        for _ in range(4):
            engine.step()
        second, third = engine.submit(prefilling), engine.submit(leaving)
        decode = context.decode
        outcomes: list[str] = []

        def interrupted_decode(rows: object) -> object:
            if third not in engine._live or outcomes:
                return decode(rows)
            engine.scheduler.prefill.row_seconds = 1.0  # the rest of the pass is worth the loss
            if node is None:
                engine.cancel(third)
            try:
                with calling_at_node(context, node or 0, lambda: engine.cancel(third)):
                    result = decode(rows)
            except Aborted:
                outcomes.append("aborted")
                raise
            outcomes.append("completed")
            return result

        context.decode = interrupted_decode  # type: ignore[method-assign]
        answers = [answer_of(runner, first), runner.engine.pop_answer(second)]
        assert outcomes == ["aborted"]
        assert [[token.id for token in answer.tokens] for answer in answers] == expected
        assert engine.pop_answer(third).finish == "cancelled"
