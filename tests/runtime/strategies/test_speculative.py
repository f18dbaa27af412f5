"""Speculative decoding gives the text of plain decoding in fewer passes, with correct cells."""

from collections.abc import Callable

import pytest

from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.drafting.pass_cost import PassCost
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.fixtures.fakes import EOS, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})
VERSE = b"row, row, row your boat gently down the stream; row, row, row your boat gently down the stream. the end"
PROMPT = b"sing: "


def reciting(reply: bytes, prompt: bytes = PROMPT) -> Callable[[list[int]], int]:
    """Say `reply` by place, whatever stands before: guesses that are wrong do not lead it astray."""
    return lambda tokens: reply[at] if (at := len(tokens) - len(prompt)) < len(reply) else EOS


def engine(
    context: FakeContext, drafter: Drafter | None = None, curve: PassCost | None = None
) -> Engine:
    model = FakeModel()
    means = Speculation((drafter or PromptLookup(),), curve or Steady(CHEAP), 16)
    return Engine(context, model, None, means)


def finish(machine: Engine, number: int) -> Answer:
    for _ in range(2000):
        if not machine.is_busy:
            return machine.pop_answer(number)
        machine.step()
        machine.ledger.check()
    raise AssertionError("it never ended")


def request(strategy: str = "speculative", prompt: bytes = PROMPT, **more) -> Request:
    sampling = GREEDY.with_values(more.pop("values", {}))
    return Request(tuple(prompt), sampling, strategy=strategy, **more)


def both(
    reply: bytes, drafter: Drafter | None = None, **more
) -> tuple[Answer, Answer, FakeContext]:
    """A plain and a speculative answer to the same request, and the context of the second."""
    answers = []
    for strategy in ("plain", "speculative"):
        context = FakeContext(n_ctx=512, reply=reciting(reply))
        machine = engine(context, drafter)
        answers.append(finish(machine, machine.submit(request(strategy, **more))))
    return answers[0], answers[1], context


def said(answer: Answer) -> tuple[object, ...]:
    return (
        answer.text,
        answer.finish,
        [(token.id, token.text, token.logprob) for token in answer.tokens],
    )


def test_repetitions_are_guessed_and_the_text_is_plain_s():
    plain, guessed, context = both(VERSE)
    assert said(guessed) == said(plain)
    assert len(context.batches) < len(plain.tokens) * 0.6
    assert guessed.n_drafted > guessed.n_accepted > 30
    assert plain.n_drafted is None


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_however_many_guesses_are_wrong_the_text_is_the_same(right: float):
    drafter = Knowing(VERSE, right, chance=0.99)
    plain, guessed, context = both(VERSE, drafter, logprobs=True)
    assert said(guessed) == said(plain)
    assert sum(accepted for _, accepted in drafter.results) == guessed.n_accepted
    assert len(context.batches) == 1 + len(VERSE) - guessed.n_accepted


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
def test_the_sampler_draws_at_every_row_as_it_would_alone(values: dict[str, float]):
    plain, guessed, _ = both(VERSE, Knowing(VERSE, 0.8, chance=0.99), values=values)
    assert said(guessed) == said(plain)
    assert guessed.n_accepted


@pytest.mark.parametrize("limit", range(8))
def test_a_limit_in_the_middle_of_a_pass_ends_the_text_there(limit: int):
    plain, guessed, _ = both(VERSE, Knowing(VERSE, chance=0.99), max_tokens=limit)
    assert said(guessed) == said(plain)
    assert guessed.finish == "length"


@pytest.mark.parametrize("reply", [b"", b"a", b"abc", b"abcd", b"abcdefgh"])
def test_an_end_token_among_the_guesses_ends_the_text_and_its_cell_goes(reply: bytes):
    context = FakeContext(reply=reciting(reply))
    machine = engine(context, Knowing([*reply, EOS, *b"more that nobody asked for"], chance=0.99))
    answer = finish(machine, machine.submit(request()))
    assert (answer.text, answer.finish) == (reply.decode(), "stop")
    assert machine.ledger.tokens[0] == [*PROMPT, *reply][: len(machine.ledger.tokens[0])]
    assert machine.ledger.n_idle == 1


def test_a_stop_string_among_the_guesses_ends_the_text_and_is_not_shown():
    plain, guessed, _ = both(VERSE, Knowing(VERSE, chance=0.99), stops=("boat",))
    assert said(guessed) == said(plain)
    assert guessed.text == "row, row, row your "


def test_ends_are_ignored_where_they_are_to_be():
    plain, guessed, _ = both(b"abcabcabcabc", max_tokens=60, ignore_eos=True)
    assert said(guessed) == said(plain)
    assert len(guessed.tokens) == 60


def test_the_cells_of_wrong_guesses_are_given_back_and_the_next_turn_finds_the_right_ones():
    context = FakeContext(n_ctx=512, reply=reciting(VERSE))
    machine = engine(context, Knowing(VERSE, 0.7, chance=0.99))
    first = finish(machine, machine.submit(request()))
    assert machine.ledger.used_cells == len(PROMPT) + len(first.tokens)
    again = PROMPT + VERSE + b" and again"
    second = finish(machine, machine.submit(request(prompt=again, max_tokens=1)))
    assert second.cached_tokens == len(PROMPT) + len(VERSE)


def test_guesses_never_push_anything_out_and_the_context_is_used_to_its_last_cell():
    answers = []
    for strategy in ("plain", "speculative"):
        machine = engine(FakeContext(n_ctx=20, reply=reciting(VERSE)), Knowing(VERSE, chance=0.99))
        answers.append(finish(machine, machine.submit(request(strategy))))
    assert said(answers[0]) == said(answers[1])
    assert answers[1].finish == "context_full"


def test_in_company_nobody_guesses():
    context = FakeContext(n_ctx=512, n_seq_max=2, reply=reciting(VERSE))
    machine = engine(context, Knowing(VERSE, chance=0.99))
    one, other = (machine.submit(request(prompt=PROMPT)) for _ in range(2))
    while machine.is_busy:
        machine.step()
        machine.ledger.check()
    assert machine.pop_answer(one).text == machine.pop_answer(other).text == VERSE.decode()
    assert max(context.batches[1:]) <= 2 + len(PROMPT)


def test_a_cancelled_answer_keeps_what_was_said():
    context = FakeContext(n_ctx=512, reply=reciting(VERSE))
    machine = engine(context, Knowing(VERSE, chance=0.99))
    number = machine.submit(request())
    for _ in range(3):
        machine.step()
    machine.cancel(number)
    answer = finish(machine, number)
    assert answer.finish == "cancelled"
    assert VERSE.decode().startswith(answer.text)
    assert len(answer.text) > 3


@pytest.mark.parametrize("number", range(5))
def test_an_interrupted_pass_changes_nothing(number: int):
    context = FakeContext(n_ctx=512, reply=reciting(VERSE), abort_at=number)
    machine = engine(context, Knowing(VERSE, 0.8, chance=0.99))
    assert finish(machine, machine.submit(request())).text == VERSE.decode()


def test_a_memory_that_cannot_take_back_is_computed_anew_once_and_guesses_no_more():
    context = FakeContext(n_ctx=512, reply=reciting(VERSE), is_recurrent=True)
    machine = engine(context, Knowing(VERSE, 0.0, chance=0.99))
    answer = finish(machine, machine.submit(request()))
    assert answer.text == VERSE.decode()
    assert answer.n_accepted == 0 < answer.n_drafted <= 15


def test_where_a_window_has_moved_on_too_far_the_text_is_computed_anew():
    context = FakeContext(n_ctx=512, reply=reciting(VERSE), n_swa=32)
    machine = engine(context, Knowing(VERSE, 0.8, chance=0.99))
    assert finish(machine, machine.submit(request())).text == VERSE.decode()


def test_the_tokens_of_a_pass_share_its_time():
    _, guessed, context = both(VERSE, Knowing(VERSE, chance=0.99))
    assert len({token.ms for token in guessed.tokens}) <= len(context.batches)
    for token in guessed.tokens:
        assert token.decode_ms + token.sample_ms <= token.ms * 1.001
    assert guessed.generate_ms == pytest.approx(sum(token.ms for token in guessed.tokens[1:]))
