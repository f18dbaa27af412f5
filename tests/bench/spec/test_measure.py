"""The measurements of `bench spec`: the order of answers, acceptance by depth, and speeds."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmcli.bench.spec.measure import (
    MethodTrial,
    compare_speeds,
    join_costs,
    measure_method,
    measure_task,
)
from llmcli.bench.spec.task_kinds import TaskKind
from llmcli.runtime.drafting.gain.pass_cost import PassCost
from llmcli.runtime.requests.draft_counts import DraftCounts
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.strategies.base import Speculation
from llmcli.types import TokenTime
from tests.fixtures.drafts import Knowing, Steady
from tests.fixtures.fakes import EOS, fake_runner

REPLY = b"the quick brown fox jumps over the lazy dog, and then it sleeps in the sun."
TASK = TaskKind("verse", "verses", ("one", "two", "three"))
# with which no draft saves time
EXPENSIVE = {1: 1.0, 4: 10.0, 8: 20.0, 12: 30.0, 16: 40.0}


def speak(tokens: list[int]) -> int:
    """Return the next byte of REPLY after the prompt of the fake template."""
    raw = bytes(token for token in tokens if token < 256)
    at = len(raw) - raw.index(b"<assistant>") - len(b"<assistant>")
    return REPLY[at] if at < len(REPLY) else EOS


def open_trial(drafter: Knowing, seconds: dict[int, float] = EXPENSIVE) -> MethodTrial:
    runner = fake_runner(speak, n_ctx=512)
    return MethodTrial(runner, Speculation((drafter,), Steady(seconds), 16), 128)


def answer(
    tokens_per_second: float, count: int = 20, text: str = "a", drafts: int = 0, passes: int = 0
) -> Answer:
    """Return an answer of `count` tokens with this speed after the first."""
    tokens = tuple(
        TokenTime(1, text, 1000.0 if at == 0 else 1000 / tokens_per_second, 0.0, 0.0)
        for at in range(count)
    )
    counts = (DraftCounts("x", (drafts,), (drafts,), (drafts,)),) if drafts else ()
    return Answer(text, tokens, "stop", 5, 0, 1.0, 0, drafts=counts, n_passes=passes)


class RecordedTrial:
    """A stand-in for MethodTrial. `calls`: kind of answer, prompt and client, in order."""

    method = "x"

    def __init__(self, plain: Callable[[], Answer], drafted: Callable[[], Answer]) -> None:
        self.make_plain, self.make_drafted = plain, drafted
        self.calls: list[tuple[str, ...]] = []
        self.costs = iter((PassCost({1: 2.0, 4: 3.0}), PassCost({1: 1.0, 4: 4.0})))

    def plain(self, prompt: str) -> Answer:
        self.calls.append(("plain", prompt))
        return self.make_plain()

    def drafted(self, prompt: str, client: str) -> Answer:
        self.calls.append(("drafted", prompt, client))
        return self.make_drafted()

    def drafted_longest(self, prompt: str, client: str) -> Answer:
        self.calls.append(("longest", prompt, client))
        return self.make_drafted()

    def measure_cost(self) -> PassCost:
        return next(self.costs)


def test_answers_alternate_and_no_client_gets_a_prompt_twice():
    trial, ticks = RecordedTrial(lambda: answer(10), lambda: answer(10)), []
    measure_task(trial, TASK, 8, lambda: ticks.append(None))  # type: ignore[arg-type]
    assert [call[:2] for call in trial.calls[:3]] == [
        ("longest", prompt) for prompt in TASK.prompts
    ]
    pairs = trial.calls[3:]
    assert [call[0][0] for call in pairs] == list("pddp" * 4)
    assert [call[1] for call in pairs[::2]] == [call[1] for call in pairs[1::2]]
    assert [call[1] for call in pairs[::2]] == ["one", "two", "three"] * 2 + ["one", "two"]
    seen = [call[1:] for call in trial.calls if len(call) == 3]
    assert len(set(seen)) == len(seen)
    assert len(ticks) == len(TASK.prompts) + 8


def test_a_result_has_the_ratio_of_the_speeds_and_the_sums_of_counts():
    trial = RecordedTrial(lambda: answer(10), lambda: answer(15, drafts=4, passes=15))
    result = measure_task(trial, TASK, 6)  # type: ignore[arg-type]
    assert result.comparison
    assert result.comparison.ratio == pytest.approx(1.5)
    assert (result.comparison.low, result.comparison.high) == pytest.approx((1.5, 1.5))
    assert result.longest == DraftCounts("x", (12,), (12,), (12,))
    assert result.used.n_drafts == 24
    assert result.tokens_per_pass == pytest.approx(19 / 15)
    assert result.longest_tokens_per_pass == pytest.approx(1 + 12 / 45)
    assert (result.n_pairs, result.n_same) == (6, 6)


def test_pairs_with_a_short_answer_have_no_speed():
    assert compare_speeds([answer(10, 7)], [answer(20)]) is None
    compared = compare_speeds([answer(10, 7), answer(10)], [answer(20), answer(30)])
    assert compared
    assert (compared.a, compared.b) == (pytest.approx((10,)), pytest.approx((30,)))


def test_the_shorter_time_of_both_measurements_counts():
    trial = RecordedTrial(lambda: answer(10), lambda: answer(10))
    result = measure_method(trial, [TASK], 1)  # type: ignore[arg-type]
    assert (result.cost(1), result.cost(4)) == (1.0, 3.0)
    joined = join_costs(PassCost({1: 2.0, 4: 2.0, 8: 6.0}), PassCost({1: 1.0, 4: 1.5}))
    assert joined.ratios == {1: 1.0, 4: 1.5, 8: 3.0}


def test_the_longest_drafts_are_made_even_where_they_cost_too_much():
    drafter = Knowing(REPLY, 0.7, seed=5)
    trial = open_trial(drafter)
    plain, drafted = trial.plain("one"), trial.drafted("one", "a")
    assert (plain.text, drafted.text) == (REPLY.decode(),) * 2
    assert drafted.drafts == ()
    longest = trial.drafted_longest("one", "b")
    assert longest.text == REPLY.decode()
    (counts,) = longest.drafts
    assert counts.n_drafts == len(drafter.results) == len(drafter.lengths)
    assert len(counts.guesses) == 15
    assert counts.n_right == sum(accepted for _, accepted in drafter.results)
    assert [answer.cached_tokens for answer in (plain, drafted, longest)] == [0, 0, 0]


@pytest.mark.parametrize("chance", [0.01, 0.5, 1.0])
def test_the_longest_drafts_do_not_depend_on_chances(chance: float):
    drafter = Knowing(REPLY, 0.0, chance=chance)
    runner = fake_runner(speak, n_ctx=512)
    trial = MethodTrial(runner, Speculation((drafter,), Steady(EXPENSIVE), 16), 64)
    longest = trial.drafted_longest("one", "a")
    assert longest.text == REPLY[:64].decode()
    # no draft is made for the last token, which needs no guess
    assert longest.drafts[0].n_drafts == longest.n_passes - 1


def test_recurrent_state_limits_the_longest_drafts():
    runner = fake_runner(speak, n_ctx=512, is_recurrent=True, n_rs_seq=3)
    trial = MethodTrial(runner, Speculation((Knowing(REPLY),), Steady(EXPENSIVE), 16), 64)
    longest = trial.drafted_longest("one", "a")
    assert longest.text == REPLY[:64].decode()
    assert len(longest.drafts[0].guesses) == 3


def test_no_drafter_observes_plain_answers_and_the_cost_of_passes(
    monkeypatch: pytest.MonkeyPatch,
):
    trial = open_trial(Knowing(REPLY))
    context, observers = trial.runner.context, set()
    observe = context.on_computed = lambda rows: None
    context.before = lambda number: observers.add(context.on_computed)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "llmcli.bench.spec.measure.measure_pass_cost",
        lambda context, max_rows: observers.add(context.on_computed),
    )
    trial.plain("one")
    trial.measure_cost()
    assert observers == {None}
    trial.drafted("one", "a")
    assert observers == {None, observe}


def test_no_answer_uses_cached_tokens_not_even_of_host_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmcli.runtime.kv_cache.offload.is_worth_storing", lambda cost: True)
    trial = open_trial(Knowing(REPLY))
    engine = trial.runner.engine
    engine.schedule = replace(engine.schedule, host_bytes=1 << 20)
    answers = [trial.plain("one"), trial.drafted("one", "a"), trial.plain("one")]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0]
    assert not len(engine.scheduler.idle_offload)


def test_ctrl_c_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    trial = open_trial(Knowing(REPLY))
    submit = Runner.reply

    def reply_and_stop(self: Runner, *arguments: object) -> object:
        stream = submit(self, *arguments)  # type: ignore[arg-type]
        stream.stop()
        return stream

    monkeypatch.setattr(Runner, "reply", reply_and_stop)
    with pytest.raises(KeyboardInterrupt):
        trial.plain("one")
