"""The time of each phase, with a fake clock."""

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
    """Says what time it is made to be."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def runner(stories_gguf: Path) -> Iterator[Runner]:
    with open_runner(stories_gguf, RunOptions(ctx_size=512, threads=1)) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """llama_decode takes 100 s for a prompt and 10 for a token, a draw 3, a token's text 0.5."""
    clock, library = Clock(), lib()

    def slower(owner: Any, name: str, seconds: Any) -> None:
        function = getattr(owner, name)

        def slow(*args: Any) -> Any:
            clock.now += seconds(*args) if callable(seconds) else seconds
            return function(*args)

        monkeypatch.setattr(owner, name, slow)

    slower(library, "llama_decode", lambda context, batch: 10 if batch.n_tokens == 1 else 100)
    for kind in (GreedyChain, GreedyNative):
        slower(kind, "draw", 3)
    slower(Detokenizer, "feed", 0.5)
    slower(Runner, "encode_text", 7)
    return clock


def measure(runner: Runner, clock: Clock, answers: int = 2) -> phases.PhaseBreakdown:
    def show(event: object) -> None:
        clock.now += 0.25

    return phases.measure_phases(runner, PROMPT, GREEDY, 6, answers, show, clock=clock)


def test_every_phase_gets_what_was_spent_in_it(runner: Runner, clock: Clock) -> None:
    found = measure(runner, clock)
    assert {phase: found.answer_seconds(phase) for phase in phases.PHASES} == {
        "tokenize": (7, 7, 7), "prefill": (100, 100, 100), "decode": (50, 50, 50), "sample": (18, 18, 18),
        "detokenize": (3, 3, 3), "screen": (1.75, 1.75, 1.75), "python": (0, 0, 0),
    }  # fmt: skip
    assert found.total_seconds == 179.75
    assert {phase: found.token_seconds(phase) for phase in phases.TOKEN_PHASES} == {
        "decode": (10, 10, 10), "sample": (3, 3, 3), "detokenize": (0.5, 0.5, 0.5), "screen": (0.25, 0.25, 0.25),
        "python": (0, 0, 0),
    }  # fmt: skip
    assert [len(one.tokens) for one in found.answers] == [5, 5]


def test_what_no_clock_has_seen_is_python_s(
    runner: Runner, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = runner.engine.step

    def slow() -> Any:
        clock.now += 1
        return planned()

    monkeypatch.setattr(runner.engine, "step", slow)
    found = measure(runner, clock)
    assert found.token_seconds("python") == (1, 1, 1)
    assert found.answer_seconds("python") == (6, 6, 6)
    assert found.answer_seconds("decode") == (50, 50, 50)


def test_the_whole_is_its_parts_and_nothing_of_one_answer_helps_the_next(
    runner: Runner, clock: Clock
) -> None:
    found = measure(runner, clock, answers=3)
    assert [one.phases["prefill"] for one in found.answers] == [100, 100, 100]
    assert found.prompt_tokens == len(runner.encode_text(PROMPT))


def test_the_clocks_are_taken_out_again(runner: Runner) -> None:
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


def test_a_probe_adds_up_and_begins_anew() -> None:
    clock = Clock()
    probe = FunctionTimers(clock)

    def work(seconds: float) -> float:
        clock.now += seconds
        if seconds > 4:
            raise KeyError(seconds)
        return seconds

    timed = probe.wrap("work", work)
    assert timed(1) + timed(2) == 3
    with pytest.raises(KeyError):
        timed(5)
    assert probe.reset() == {"work": 8}
    assert probe.reset() == {}


def test_the_prompt_is_no_longer_than_asked_for(runner: Runner) -> None:
    lengths = [
        len(phases.encode_prompt(runner, phases.build_prompt(runner, count)))
        for count in (100, 200)
    ]
    assert lengths[0] <= 100 < lengths[1] <= 200
    assert phases.build_prompt(runner, 1) == phases.PROMPT_SENTENCE
