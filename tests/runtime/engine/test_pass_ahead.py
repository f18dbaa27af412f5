"""A pass that begins before the texts of drawn tokens are handled changes no answer and no cell."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmcli.runtime.binding.contexts import context as context_module
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.kernels import pass_thread
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.plain import PlainStrategy

pytestmark = pytest.mark.skipif(
    pass_thread.load_library() is None, reason="llmcli's C code is not installed"
)
SAMPLING = default_sampling().with_values({"temp": 1.0, "top_k": 40, "seed": 5})
GREEDY = default_sampling().with_values({"temp": 0})
PROMPTS = ((1, 403, 407), (1, 261, 378, 400, 421), (1, 432), (1, 300, 301, 302))


@contextmanager
def opened(model: Path, overlaps: bool, slots: int = 4, **more: Any) -> Iterator[Runner]:
    options = RunOptions(**{"ctx_size": 1024, "threads": 1, "overlaps_passes": overlaps, **more})
    with open_runner(model, options, slots=slots) as runner:
        yield runner


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every pass that was begun ahead."""
    rows_of_passes: list[int] = []
    begin = Context.begin_decode

    def count(context: Context, rows: Any) -> None:
        rows_of_passes.append(len(rows))
        begin(context, rows)

    monkeypatch.setattr(Context, "begin_decode", count)
    return rows_of_passes


def finish(runner: Runner, ids: list[int], act: Callable[[int], None] = lambda step: None):
    """Run the engine to the end, with `act` called after each step. Return the answers."""
    for step in range(1000):
        if not runner.engine.is_busy:
            runner.engine.check()
            return [runner.engine.pop_answer(number) for number in ids]
        runner.engine.step()
        act(step)
    raise AssertionError("the answers do not end")


def summary(answer: Answer) -> tuple[Any, ...]:
    return [token.id for token in answer.tokens], answer.text, answer.finish, answer.cached_tokens


def answers(model: Path, overlaps: bool, requests: list[Request], **more: Any) -> list[Any]:
    with opened(model, overlaps, **more) as runner:
        ids = [runner.engine.submit(request) for request in requests]
        return [summary(answer) for answer in finish(runner, ids)]


def requests(sampling=SAMPLING, **more: Any) -> list[Request]:
    return [
        Request(prompt, sampling.with_values({"seed": 5 + number}), 20 + 7 * number, **more)
        for number, prompt in enumerate(PROMPTS)
    ]


PENALIZED = SAMPLING.with_values({"repeat_penalty": 1.3, "repeat_last_n": 64})


@pytest.mark.parametrize(
    "made",
    [
        requests(),
        requests(GREEDY),
        requests(PENALIZED),
        requests(ignore_eos=True),
        requests()[:1],
        requests(strategy="speculative"),
    ],
    ids=["sampled", "greedy", "penalties", "no end", "one", "speculative"],
)
def test_answers_are_those_without_overlap(
    stories_gguf: Path, begun: list[int], made: list[Request]
) -> None:
    expected = answers(stories_gguf, False, made)
    assert not begun
    assert answers(stories_gguf, True, made) == expected
    assert max(begun) == len(made)


@pytest.mark.parametrize(
    "made",
    [requests(logprobs=True), requests(strategy="beam")[:1]],
    ids=["log-probabilities", "beam"],
)
def test_nothing_overlaps_where_the_pass_is_still_needed(
    stories_gguf: Path, begun: list[int], made: list[Request]
) -> None:
    assert answers(stories_gguf, True, made) == answers(stories_gguf, False, made)
    assert not begun


@pytest.mark.parametrize("count", [1, 4])
def test_a_stop_string_ends_an_answer_whose_next_token_is_being_computed(
    stories_gguf: Path, begun: list[int], count: int
) -> None:
    free = answers(stories_gguf, False, requests(ignore_eos=True)[:count])
    made = [
        replace(request, stops=(text[len(text) // 2 :][:5],))
        for request, (_, text, _, _) in zip(requests(ignore_eos=True), free, strict=False)
    ]
    expected = answers(stories_gguf, False, made)
    assert {reason for _, _, reason, _ in expected} == {"stop"}
    assert answers(stories_gguf, True, made) == expected
    assert max(begun) == count


def test_a_token_that_was_not_drawn_is_computed_anew(
    stories_gguf: Path, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(stories_gguf, False, requests())
    next_token = PlainStrategy.next_token

    def guess(strategy: PlainStrategy, sequence: Any) -> int | None:
        token = next_token(strategy, sequence)
        return token if token is None or len(sequence.times) % 3 else (token + 1) % 512

    monkeypatch.setattr(PlainStrategy, "next_token", guess)
    assert answers(stories_gguf, True, requests()) == expected
    assert begun


def test_a_request_that_comes_during_a_pass_begins_with_the_next(
    stories_gguf: Path, begun: list[int]
) -> None:
    made = requests(ignore_eos=True)
    expected = [answers(stories_gguf, False, [request])[0][:3] for request in made]
    with opened(stories_gguf, True) as runner:
        ids = [runner.engine.submit(made[0])]

        def submit(step: int) -> None:
            if step % 4 == 3 and len(ids) < len(made):
                ids.append(runner.engine.submit(made[len(ids)]))

        found = finish(runner, ids, submit)
    assert [summary(answer)[:3] for answer in found] == expected
    assert begun


@pytest.mark.parametrize("end", ["cancel", "abort", "interrupt", "settle"])
def test_a_begun_pass_can_be_given_up(stories_gguf: Path, begun: list[int], end: str) -> None:
    made = requests(ignore_eos=True)
    expected = answers(stories_gguf, False, made)
    with opened(stories_gguf, True) as runner:
        engine = runner.engine
        ids = [engine.submit(request) for request in made]

        def act(step: int) -> None:
            if step != 8:
                return
            assert engine._pass_ahead is not None
            if end == "cancel":
                engine.cancel(ids[1])
            elif end == "abort":
                engine.abort(ids[1])
            elif end == "interrupt":
                runner.context.interrupt()
            else:
                engine.settle()
                engine.ledger.check()

        kept = [number for number in ids if end != "abort" or number != ids[1]]
        found = dict(zip(kept, finish(runner, kept, act), strict=True))
    for number, answer in zip(ids, expected, strict=True):
        if number != ids[1] or end in ("interrupt", "settle"):
            assert summary(found[number]) == answer
    if end == "cancel":
        tokens, _, reason, _ = summary(found[ids[1]])
        assert reason == "cancelled"
        assert 0 < len(tokens) < 12
        assert tokens == expected[1][0][: len(tokens)]


def test_a_pool_that_becomes_full_ends_answers_as_without_overlap(
    stories_gguf: Path, begun: list[int]
) -> None:
    made = [Request(prompt, SAMPLING, None, ignore_eos=True) for prompt in PROMPTS[:2]]
    expected = answers(stories_gguf, False, made, ctx_size=256, slots=2)
    assert answers(stories_gguf, True, made, ctx_size=256, slots=2) == expected
    assert begun


def test_a_context_closes_during_a_pass(stories_gguf: Path, begun: list[int]) -> None:
    with opened(stories_gguf, True) as runner:
        runner.engine.submit(requests(ignore_eos=True)[0])
        while not begun:
            runner.engine.step()
    assert begun == [1]


def test_without_a_thread_passes_do_not_overlap(
    stories_gguf: Path, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no thread")

    expected = answers(stories_gguf, False, requests())
    monkeypatch.setattr(context_module, "PassThread", refuse)
    assert answers(stories_gguf, True, requests()) == expected
    assert len(begun) == 1


def test_nothing_overlaps_while_hidden_states_are_read(
    stories_gguf: Path, begun: list[int]
) -> None:
    with opened(stories_gguf, True) as runner:
        observed: list[int] = []
        runner.context.on_computed = lambda rows: observed.append(len(rows))
        finish(runner, [runner.engine.submit(request) for request in requests()])
    assert observed
    assert not begun


def test_the_cache_cannot_be_changed_during_a_pass(stories_gguf: Path, begun: list[int]) -> None:
    with opened(stories_gguf, True) as runner:
        runner.engine.submit(requests(ignore_eos=True)[0])
        while not begun:
            runner.engine.step()
        with pytest.raises(AssertionError, match="a pass is being computed"):
            runner.context.trim(0, 1)
        runner.engine.settle()
        assert runner.context.trim(0, 1)
