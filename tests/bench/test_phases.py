"""The times of the phases of an answer, with a fake clock."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcli.bench import phases
from llmcli.bench.function_timers import FunctionTimers
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.sampler import GreedyNative
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.chain import GreedyChain
from llmcli.runtime.text.detokenizer import Detokenizer

PROMPT = phases.PROMPT_SENTENCE * 2
GREEDY = default_sampling().with_values({"temp": 0})


class Clock:
    """A clock that shows the time in `now`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def runner(stories_gguf: Path) -> Iterator[Runner]:
    with open_runner(stories_gguf, RunOptions(ctx_size=512, threads=1)) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make functions take fixed times on a fake clock: llama_decode 100 s for a prompt and 10 s for
    a token, drawing a token 3 s, and detokenizing 0.5 s.
    """
    clock, library = Clock(), lib()

    def slow_down(owner: Any, name: str, seconds: Any) -> None:
        function = getattr(owner, name)

        def slow(*args: Any) -> Any:
            clock.now += seconds(*args) if callable(seconds) else seconds
            return function(*args)

        monkeypatch.setattr(owner, name, slow)

    slow_down(library, "llama_decode", lambda context, batch: 10 if batch.n_tokens == 1 else 100)
    for kind in (GreedyChain, GreedyNative):
        slow_down(kind, "draw", 3)
    slow_down(Detokenizer, "feed", 0.5)
    slow_down(Runner, "encode_text", 7)
    return clock


def measure(runner: Runner, clock: Clock, answers: int = 2) -> phases.PhaseBreakdown:
    def show(event: object) -> None:
        clock.now += 0.25

    return phases.measure_phases(runner, PROMPT, GREEDY, 6, answers, show, clock=clock)


def test_every_phase_has_its_time(runner: Runner, clock: Clock) -> None:
    breakdown = measure(runner, clock)
    assert {phase: breakdown.answer_seconds(phase) for phase in phases.PHASES} == {
        "tokenize": (7, 7, 7), "prefill": (100, 100, 100), "decode": (50, 50, 50), "sample": (18, 18, 18),
        "detokenize": (3, 3, 3), "screen": (1.75, 1.75, 1.75), "python": (0, 0, 0),
    }  # fmt: skip
    assert breakdown.total_seconds == 179.75
    assert {phase: breakdown.token_seconds(phase) for phase in phases.TOKEN_PHASES} == {
        "decode": (10, 10, 10), "sample": (3, 3, 3), "detokenize": (0.5, 0.5, 0.5), "screen": (0.25, 0.25, 0.25),
        "python": (0, 0, 0),
    }  # fmt: skip
    assert [len(answer.tokens) for answer in breakdown.answers] == [5, 5]


def test_unmeasured_time_belongs_to_the_phase_python(
    runner: Runner, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_step = runner.engine.step

    def slow() -> Any:
        clock.now += 1
        return original_step()

    monkeypatch.setattr(runner.engine, "step", slow)
    breakdown = measure(runner, clock)
    assert breakdown.token_seconds("python") == (1, 1, 1)
    assert breakdown.answer_seconds("python") == (6, 6, 6)
    assert breakdown.answer_seconds("decode") == (50, 50, 50)


def test_no_answer_reuses_the_cache_of_an_earlier_one(runner: Runner, clock: Clock) -> None:
    breakdown = measure(runner, clock, answers=3)
    assert [answer.phases["prefill"] for answer in breakdown.answers] == [100, 100, 100]
    assert breakdown.prompt_tokens == len(runner.encode_text(PROMPT))


def test_the_timers_are_removed_after_the_measurement(runner: Runner) -> None:
    before = lib().llama_decode, GreedyChain.draw, Detokenizer.feed, runner.engine.resources
    phases.measure_phases(runner, PROMPT, GREEDY, 3, 1, lambda event: None)
    assert before == (
        lib().llama_decode,
        GreedyChain.draw,
        Detokenizer.feed,
        runner.engine.resources,
    )

    def stopped(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        phases.measure_phases(runner, PROMPT, GREEDY, 3, 1, stopped)
    assert before == (
        lib().llama_decode,
        GreedyChain.draw,
        Detokenizer.feed,
        runner.engine.resources,
    )
    assert not runner.engine.is_busy


def test_function_timers_add_up_and_can_be_reset() -> None:
    clock = Clock()
    timers = FunctionTimers(clock)

    def work(seconds: float) -> float:
        clock.now += seconds
        if seconds > 4:
            raise KeyError(seconds)
        return seconds

    timed = timers.wrap("work", work)
    assert timed(1) + timed(2) == 3
    with pytest.raises(KeyError):
        timed(5)
    assert timers.reset() == {"work": 8}
    assert timers.reset() == {}


def test_the_prompt_is_no_longer_than_requested(runner: Runner) -> None:
    lengths = [
        len(phases.encode_prompt(runner, phases.build_prompt(runner, count)))
        for count in (100, 200)
    ]
    assert lengths[0] <= 100 < lengths[1] <= 200
    assert phases.build_prompt(runner, 1) == phases.PROMPT_SENTENCE
