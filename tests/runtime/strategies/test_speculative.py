"""Speculative decoding: the same answers as plain decoding in fewer passes, and correct cells."""

from collections.abc import Callable
from typing import Any

import pytest

from llmcli.runtime.drafting.base import Draft, Drafter
from llmcli.runtime.drafting.gain.pass_cost import PassCost
from llmcli.runtime.drafting.gain.tree_shape import TreeShape
from llmcli.runtime.drafting.ngram import NgramDrafts, PromptLookup
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.draft_counts import sum_counts
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.fixtures.fakes import EOS, FakeClock, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})
VERSE = b"row, row, row your boat gently down the stream; row, row, row your boat gently down the stream. the end"
PROMPT = b"sing: "


def by_position(reply: bytes, prompt: bytes = PROMPT) -> Callable[[list[int]], int]:
    """Return a function that gives the next token of `reply` by the number of tokens so far, so
    that wrong guesses do not change the answer.
    """
    return lambda tokens: reply[at] if (at := len(tokens) - len(prompt)) < len(reply) else EOS


def make_engine(
    context: FakeContext, drafter: Drafter | None = None, cost: PassCost | None = None
) -> Engine:
    model = FakeModel()
    speculation = Speculation((drafter or PromptLookup(),), cost or Steady(CHEAP), 16)
    return Engine(context, model, None, speculation)


def finish(engine: Engine, number: int) -> Answer:
    for _ in range(2000):
        if not engine.is_busy:
            return engine.pop_answer(number)
        engine.step()
        engine.ledger.check()
    raise AssertionError("the answer did not end")


def request(strategy: str = "speculative", prompt: bytes = PROMPT, **fields) -> Request:
    sampling = GREEDY.with_values(fields.pop("values", {}))
    return Request(tuple(prompt), sampling, strategy=strategy, **fields)


def answer_twice(
    reply: bytes, drafter: Drafter | None = None, **fields
) -> tuple[Answer, Answer, FakeContext]:
    """Return the answers of plain and of speculative decoding to the same request, and the context
    of the second.
    """
    answers = []
    for strategy in ("plain", "speculative"):
        context = FakeContext(n_ctx=512, reply=by_position(reply))
        engine = make_engine(context, drafter)
        answers.append(finish(engine, engine.submit(request(strategy, **fields))))
    return answers[0], answers[1], context


def contents(answer: Answer) -> tuple[object, ...]:
    """Return what must be equal with and without drafts: text, end and log-probabilities."""
    return (
        answer.text,
        answer.finish,
        [(token.id, token.text, token.logprob) for token in answer.tokens],
    )


def test_repetitions_are_guessed_and_the_answer_is_that_of_plain_decoding():
    plain, speculative, context = answer_twice(VERSE)
    assert contents(speculative) == contents(plain)
    assert len(context.batches) < len(plain.tokens) * 0.6
    assert speculative.n_drafted > speculative.n_accepted > 30
    assert plain.n_drafted is None


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_wrong_guesses_do_not_change_the_answer(right: float):
    drafter = Knowing(VERSE, right, chance=0.99)
    plain, speculative, context = answer_twice(VERSE, drafter, logprobs=True)
    assert contents(speculative) == contents(plain)
    assert sum(accepted for _, accepted in drafter.results) == speculative.n_accepted
    assert len(context.batches) == 1 + len(VERSE) - speculative.n_accepted
    assert_counts_agree(speculative, drafter)


def assert_counts_agree(answer: Answer, drafter: Knowing) -> None:
    """Check the counts by depth against the results that the drafter was told."""
    counts = sum_counts("knowing", answer.drafts)
    depths = range(max(drafter.lengths))
    assert counts.guesses == tuple(sum(n > depth for n in drafter.lengths) for depth in depths)
    assert counts.checked == tuple(sum(n > depth for n, _ in drafter.results) for depth in depths)
    assert counts.right == tuple(sum(n > depth for _, n in drafter.results) for depth in depths)
    assert (counts.n_guesses, counts.n_right) == (answer.n_drafted, answer.n_accepted)
    n_tokens = len(answer.tokens) - 1
    assert answer.tokens_per_pass == pytest.approx(n_tokens / answer.n_passes)
    assert answer.n_passes == len(VERSE) - answer.n_accepted


def test_each_method_has_counts_of_its_own():
    context = FakeContext(n_ctx=512, reply=by_position(VERSE))
    half = len(VERSE) // 2
    drafters = tuple(
        type(f"Knowing{name}", (Knowing,), {"name": name})(VERSE, chance=chance)
        for name, chance in (("first", 0.99), ("second", 0.98))
    )
    drafters[0].answer = list(VERSE[:half])  # knows only the first half
    engine = Engine(context, FakeModel(), None, Speculation(drafters, Steady(CHEAP), 16))
    answer = finish(engine, engine.submit(request()))
    assert [counts.method for counts in answer.drafts] == ["first", "second"]
    assert [counts.n_right for counts in answer.drafts] == [
        sum(accepted for _, accepted in drafter.results) for drafter in drafters
    ]
    assert all(counts.n_right > half // 2 for counts in answer.drafts)
    assert sum(counts.n_right for counts in answer.drafts) == answer.n_accepted


@pytest.mark.parametrize("limit", range(2, 8))
def test_a_guess_after_the_end_of_the_answer_is_not_checked(limit: int):
    _, answer, _ = answer_twice(VERSE, Knowing(VERSE, chance=0.99), max_tokens=limit)
    counts = sum_counts("knowing", answer.drafts)
    assert counts.checked == counts.right


@pytest.mark.parametrize(
    "values",
    [
        {"temp": 0.8, "seed": 7},
        {
            "temp": 1.0,
            "seed": 7,
            "repeat_penalty": 1.3,
            "dry_multiplier": 0.8,
            "xtc_probability": 0.5,
        },
        {"temp": 1.5, "seed": 3, "mirostat": 2},
        {"temp": 1.5, "seed": 3, "mirostat": 1},
        {"temp": 0, "repeat_penalty": 1.5, "frequency_penalty": 0.3},
    ],
)
def test_sampled_answer_is_that_of_plain_decoding(values: dict[str, float]):
    plain, speculative, _ = answer_twice(VERSE, Knowing(VERSE, 0.8, chance=0.99), values=values)
    assert contents(speculative) == contents(plain)
    assert speculative.n_accepted


@pytest.mark.parametrize("limit", range(8))
def test_token_limit_in_the_middle_of_a_pass_ends_the_answer(limit: int):
    plain, speculative, _ = answer_twice(VERSE, Knowing(VERSE, chance=0.99), max_tokens=limit)
    assert contents(speculative) == contents(plain)
    assert speculative.finish == "length"


@pytest.mark.parametrize("reply", [b"", b"a", b"abc", b"abcd", b"abcdefgh"])
def test_end_token_among_the_guesses_ends_the_answer_and_its_cell_is_dropped(reply: bytes):
    context = FakeContext(reply=by_position(reply))
    engine = make_engine(context, Knowing([*reply, EOS, *b"text after the end"], chance=0.99))
    answer = finish(engine, engine.submit(request()))
    assert (answer.text, answer.finish) == (reply.decode(), "stop")
    assert engine.ledger.tokens[0] == [*PROMPT, *reply][: len(engine.ledger.tokens[0])]
    assert engine.ledger.n_idle == 1


def test_stop_string_among_the_guesses_ends_the_answer_and_is_not_shown():
    plain, speculative, _ = answer_twice(VERSE, Knowing(VERSE, chance=0.99), stops=("boat",))
    assert contents(speculative) == contents(plain)
    assert speculative.text == "row, row, row your "


def test_ignore_eos_ignores_end_tokens_among_the_guesses():
    plain, speculative, _ = answer_twice(b"abcabcabcabc", max_tokens=60, ignore_eos=True)
    assert contents(speculative) == contents(plain)
    assert len(speculative.tokens) == 60


def test_cells_of_wrong_guesses_are_dropped_and_the_others_are_reused_by_the_next_turn():
    context = FakeContext(n_ctx=512, reply=by_position(VERSE))
    engine = make_engine(context, Knowing(VERSE, 0.7, chance=0.99))
    first = finish(engine, engine.submit(request()))
    assert engine.ledger.used_cells == len(PROMPT) + len(first.tokens)
    again = PROMPT + VERSE + b" and again"
    second = finish(engine, engine.submit(request(prompt=again, max_tokens=1)))
    assert second.cached_tokens == len(PROMPT) + len(VERSE)


def test_guesses_fill_the_context_to_its_last_cell_like_plain_decoding():
    answers = []
    for strategy in ("plain", "speculative"):
        engine = make_engine(
            FakeContext(n_ctx=20, reply=by_position(VERSE)), Knowing(VERSE, chance=0.99)
        )
        answers.append(finish(engine, engine.submit(request(strategy))))
    assert contents(answers[0]) == contents(answers[1])
    assert answers[1].finish == "context_full"


def test_several_answers_at_once_are_not_drafted():
    context = FakeContext(n_ctx=512, n_seq_max=2, reply=by_position(VERSE))
    engine = make_engine(context, Knowing(VERSE, chance=0.99))
    one, other = (engine.submit(request(prompt=PROMPT)) for _ in range(2))
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    assert engine.pop_answer(one).text == engine.pop_answer(other).text == VERSE.decode()
    assert max(context.batches[1:]) <= 2 + len(PROMPT)


def test_passes_with_other_answers_are_not_taken_for_passes_of_one_row():
    """The second answer is longer, so that it ends alone."""
    context = FakeContext(n_ctx=512, n_seq_max=2, reply=by_position(VERSE))
    cost, timed = PassCost(CHEAP), list[tuple[int, int]]()

    def record_pass(rows: int, seconds: float) -> None:
        timed.append((rows, len(engine.ledger.busy_slots)))

    cost.record_pass = record_pass  # type: ignore[method-assign]
    engine = make_engine(context, Knowing(VERSE, chance=0), cost)
    for count in (20, 40):
        engine.submit(request(prompt=PROMPT, max_tokens=count))
    while engine.is_busy:
        engine.step()
    assert {(rows, n_busy) for rows, n_busy in timed} == {(1, 1)}
    assert 10 < len(timed) <= 20


def test_cancelled_answer_keeps_its_text_so_far():
    context = FakeContext(n_ctx=512, reply=by_position(VERSE))
    engine = make_engine(context, Knowing(VERSE, chance=0.99))
    number = engine.submit(request())
    for _ in range(3):
        engine.step()
    engine.cancel(number)
    answer = finish(engine, number)
    assert answer.finish == "cancelled"
    assert VERSE.decode().startswith(answer.text)
    assert len(answer.text) > 3


@pytest.mark.parametrize("number", range(5))
def test_interrupted_pass_is_repeated_without_effect_on_the_answer(number: int):
    context = FakeContext(n_ctx=512, reply=by_position(VERSE), abort_at=number)
    engine = make_engine(context, Knowing(VERSE, 0.8, chance=0.99))
    assert finish(engine, engine.submit(request())).text == VERSE.decode()


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9])
def test_recurrent_state_goes_back_to_a_checkpoint_before_wrong_guesses(accuracy: float):
    context = FakeContext(n_ctx=512, reply=by_position(VERSE), is_recurrent=True)
    engine = make_engine(context, Knowing(VERSE, accuracy, chance=0.99))
    engine.schedule = Schedule(host_bytes=1 << 20)
    answer = finish(engine, engine.submit(request()))
    assert answer.text == VERSE.decode()
    assert answer.n_drafted
    # the right tokens of a pass with a wrong guess are computed again, and nothing before them
    n_wrong = answer.n_drafted - answer.n_accepted
    n_again = answer.n_drafts + answer.n_accepted
    assert sum(context.batches) <= len(PROMPT) + len(VERSE) + n_wrong + n_again
    lengths = [checkpoint.length for checkpoint in engine.ledger.checkpoints.of_slot(0)]
    assert lengths == [len(PROMPT) - 1]


def test_nothing_is_drafted_for_recurrent_state_without_memory_for_checkpoints():
    context = FakeContext(n_ctx=512, reply=by_position(VERSE), is_recurrent=True)
    engine = make_engine(context, Knowing(VERSE, chance=0.99))
    answer = finish(engine, engine.submit(request()))
    assert answer.text == VERSE.decode()
    assert answer.n_drafted == 0


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_recurrent_state_goes_back_within_a_pass_without_checkpoints(right: float):
    """There is no memory for a checkpoint, so drafts have as many guesses as the state can go back."""
    context = FakeContext(n_ctx=512, reply=by_position(VERSE), is_recurrent=True, n_rs_seq=3)
    drafter = Knowing(VERSE, right, chance=0.99)
    engine = make_engine(context, drafter)
    answer = finish(engine, engine.submit(request()))
    assert answer.text == VERSE.decode()
    assert drafter.lengths
    assert max(drafter.lengths) == 3
    # nothing is computed again
    n_wrong = answer.n_drafted - answer.n_accepted
    assert sum(context.batches) <= len(PROMPT) + len(VERSE) + n_wrong


def test_the_state_goes_back_to_a_checkpoint_after_a_longer_draft():
    context = FakeContext(n_ctx=512, reply=by_position(VERSE), is_recurrent=True, n_rs_seq=3)
    drafter = Knowing(VERSE, 0.9, chance=0.99)
    engine = make_engine(context, drafter)
    engine.schedule = Schedule(host_bytes=1 << 20)
    assert finish(engine, engine.submit(request())).text == VERSE.decode()
    assert max(drafter.lengths) > 3


class SlowCheckpoints(FakeContext):
    """A recurrent context whose checkpoints take time on a clock."""

    clock, checkpoint_seconds = FakeClock(), 0.0

    def read_checkpoint(self, sequence: int) -> memoryview:
        self.clock.seconds += self.checkpoint_seconds
        return super().read_checkpoint(sequence)

    def restore_checkpoint(self, *arguments: Any, **options: Any) -> bool:
        self.clock.seconds += self.checkpoint_seconds
        return super().restore_checkpoint(*arguments, **options)


@pytest.mark.parametrize(("seconds", "right"), [(0.0, 1.0), (30.0, 1.0), (0.9, 0.0)])
def test_an_answer_does_not_lose_more_time_with_checkpoints_than_with_guesses(
    seconds: float, right: float, monkeypatch: pytest.MonkeyPatch
):
    """A pass of one row takes a second, and one of 16 takes 1.4, so that only checkpoints cost."""
    context = SlowCheckpoints(n_ctx=512, reply=by_position(VERSE), is_recurrent=True)
    context.clock, context.checkpoint_seconds = FakeClock(), seconds
    monkeypatch.setattr("llmcli.runtime.strategies.speculative.perf_counter", context.clock)
    drafter = Knowing(VERSE, right, chance=0.99)
    engine = make_engine(context, drafter)
    engine.schedule = Schedule(host_bytes=1 << 20)
    answer = finish(engine, engine.submit(request()))
    assert answer.text == VERSE.decode()
    if seconds:
        assert 1 <= len(drafter.lengths) <= 3
        # the time before the passes; going back is not part of a draft
        assert answer.drafts[0].seconds == pytest.approx(seconds * len(drafter.lengths))
    else:
        assert len(drafter.lengths) > 5


class Empty(Knowing):
    """A drafter whose drafts take a second and are empty."""

    clock = FakeClock()

    def draft(self, shape: TreeShape) -> Draft:
        self.lengths.append(len(shape))
        self.clock.seconds += 1
        return Draft()


def test_empty_drafts_are_counted_as_lost_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmcli.runtime.strategies.speculative.perf_counter", Empty.clock)
    drafter = Empty(VERSE, chance=0.99)
    engine = make_engine(FakeContext(n_ctx=512, reply=by_position(VERSE)), drafter)
    answer = finish(engine, engine.submit(request()))
    assert answer.text == VERSE.decode()
    assert answer.n_drafted == 0
    # two plain tokens and a share of the answer may be lost
    assert 2 <= len(drafter.lengths) <= 5


def test_text_is_recomputed_if_the_sliding_window_has_dropped_its_cells():
    context = FakeContext(n_ctx=512, reply=by_position(VERSE), n_swa=32)
    engine = make_engine(context, Knowing(VERSE, 0.8, chance=0.99))
    assert finish(engine, engine.submit(request())).text == VERSE.decode()


def test_tokens_of_a_pass_share_its_time():
    _, speculative, context = answer_twice(VERSE, Knowing(VERSE, chance=0.99))
    assert len({token.ms for token in speculative.tokens}) <= len(context.batches)
    for token in speculative.tokens:
        assert token.decode_ms + token.sample_ms <= token.ms * 1.001
    assert speculative.generate_ms == pytest.approx(
        sum(token.ms for token in speculative.tokens[1:])
    )


def test_drafters_do_not_read_while_other_answers_run(monkeypatch: pytest.MonkeyPatch):
    follow, read = NgramDrafts.follow, []

    def counted(self: NgramDrafts, sequence: Sequence) -> None:
        read.append(sequence.id)
        follow(self, sequence)

    monkeypatch.setattr(NgramDrafts, "follow", counted)
    context = FakeContext(n_ctx=512, n_seq_max=2, reply=lambda tokens: 97 + len(tokens) % 5)
    engine = make_engine(context)
    long = engine.submit(request(max_tokens=60, ignore_eos=True))
    short = engine.submit(request(prompt=b"other: ", max_tokens=20, ignore_eos=True))
    while engine.stats.n_running != 1:
        engine.step()
    engine.pop_answer(short)
    assert len(read) <= 1  # the last token of the short answer may come first
    answer = finish(engine, long)
    assert set(read) == {long}
    assert (len(answer.tokens), answer.n_accepted > 0) == (60, True)
