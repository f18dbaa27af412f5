"""Beam search: its bookkeeping, its order, and interruptions."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import EOS, N_VOCAB, FakeContext, FakeModel, fake_runner

GREEDY = default_sampling().with_values({"temp": 0})


class Scored(FakeContext):
    """A context whose logits are a function of the tokens: the named ones, all others 0."""

    def __init__(self, scores: Callable[[list[int]], dict[int, float]], **more: int) -> None:
        super().__init__(**more)
        self.scores = scores

    def _logits(self, tokens: Sequence[int]) -> np.ndarray:
        logits = np.zeros(N_VOCAB, np.float32)
        for token, value in self.scores(list(tokens)).items():
            logits[token] = value
        return logits


def engine(context: FakeContext) -> Engine:
    model = FakeModel()
    return Engine(context, model, None)


def request(text: str, beams: int = 4, **more) -> Request:
    search = BeamSettings(beams, more.pop("length_penalty", 1.0), more.pop("early_stopping", "no"))
    return Request(tuple(text.encode()), GREEDY, strategy="beam", search=search, **more)


def finish(machine: Engine, *ids: int) -> list[Answer]:
    while machine.is_busy:
        machine.step()
        machine.ledger.check()
    return [machine.pop_answer(one) for one in ids]


def held(context: FakeContext) -> list[int]:
    return [len(cells) for cells in context.cells]


def test_every_step_is_one_pass_of_a_row_a_beam_on_shared_cells():
    context = FakeContext(n_seq_max=4, reply=b"a longer answer")
    machine = engine(context)
    machine.submit(request("the prompt", max_tokens=12))
    while machine.is_busy:
        machine.step()
        machine.ledger.check()
        # What the cells hold is a tree: each token of it is stored once.
        tree = {
            tuple(token for _, token in cells[: end + 1])
            for cells in context.cells
            for end in range(len(cells))
        }
        assert context.used == machine.ledger.used_cells == len(tree)
    assert context.batches == [10] + [4] * 11


def test_in_the_end_only_the_best_answer_s_cells_are_kept_and_all_slots_are_free():
    context = FakeContext(n_seq_max=4)
    machine = engine(context)
    (answer,) = finish(machine, machine.submit(request("ask")))
    assert (answer.text, answer.finish) == ("hello", "stop")
    assert sorted(held(context)) == [0, 0, 0, len("ask") + len(answer.text)]
    assert machine.ledger.n_idle == 4
    (again,) = finish(machine, machine.submit(request("ask" + answer.text + " more")))
    assert again.cached_tokens == len("ask" + answer.text)


def test_the_answers_come_best_first_and_none_twice():
    machine = engine(FakeContext(n_seq_max=4, reply=b"hello world"))
    (answer,) = finish(machine, machine.submit(request("ask", max_tokens=8)))
    scores = [beam.score for beam in answer.beams]
    assert scores == sorted(scores, reverse=True)
    assert len({beam.tokens for beam in answer.beams}) == 4
    assert [token.id for token in answer.tokens] == list(answer.beams[0].tokens)
    assert {token.constraint_ms for token in answer.tokens} == {0.0}
    assert answer.beams[0].score == pytest.approx(
        sum(token.logprob or 0 for token in answer.tokens) / 8
    )


def test_of_equal_scores_the_lowest_beam_and_then_the_lowest_token_wins():
    machine = engine(Scored(lambda tokens: {5: 9, 7: 9, 8: 9}, n_seq_max=2))
    (answer,) = finish(machine, machine.submit(request("x", beams=2, max_tokens=2)))
    assert [beam.tokens for beam in answer.beams] == [(5, 5), (5, 7)]


def test_an_end_that_is_not_among_the_best_is_dropped():
    # Rank 0 and 1 are tokens 1 and 2; the end is third: with two beams it is no answer.
    machine = engine(Scored(lambda tokens: {1: 9, 2: 8.9, EOS: 8.8}, n_seq_max=3))
    (two,) = finish(machine, machine.submit(request("x", beams=2, max_tokens=1)))
    (three,) = finish(machine, machine.submit(request("x", beams=3, max_tokens=1)))
    assert [beam.tokens for beam in two.beams] == [(1,), (2,)]
    assert [beam.tokens for beam in three.beams] == [(1,), (2,), ()]


def test_the_length_penalty_decides_between_short_and_long():
    def scores(tokens: list[int]) -> dict[int, float]:
        return {1: 8.0, EOS: 8.5} if len(tokens) < 5 else {EOS: 20.0}

    said = []
    for penalty in (0.0, 3.0):
        machine = engine(Scored(scores, n_seq_max=2))
        wanted = request(
            "x", beams=2, length_penalty=penalty, early_stopping="never", max_tokens=10
        )
        said.append(finish(machine, machine.submit(wanted))[0].beams[0].tokens)
    assert said == [(), (1, 1, 1, 1)]


def test_early_stopping_ends_at_as_many_answers_as_beams():
    passes = []
    for early in ("yes", "never"):
        context = Scored(lambda tokens: {1: 9.0, EOS: 8.9}, n_seq_max=2)
        machine = engine(context)
        wanted = request("x", beams=2, length_penalty=1.0, early_stopping=early, max_tokens=30)
        (answer,) = finish(machine, machine.submit(wanted))
        assert len(answer.beams) == 2
        passes.append(len(context.batches))
    assert passes[0] < passes[1]


def test_a_cancelled_search_tells_the_best_so_far_and_frees_its_cells():
    context = FakeContext(n_seq_max=4, reply=b"hello world")
    machine = engine(context)
    one = machine.submit(request("q"))
    for _ in range(4):
        machine.step()
    machine.cancel(one)
    (answer,) = finish(machine, one)
    assert (answer.text, answer.finish, len(answer.beams)) == ("hell", "cancelled", 4)
    assert held(context).count(0) == 3
    assert machine.ledger.n_idle == 4


def test_a_search_cancelled_in_its_prompt_says_nothing():
    context = FakeContext(n_seq_max=4, n_batch=8)
    machine = engine(context)
    one = machine.submit(request("a prompt of several passes"))
    machine.step()
    machine.cancel(one)
    (answer,) = finish(machine, one)
    assert (answer.text, answer.finish, answer.beams) == ("", "cancelled", ())
    assert machine.ledger.n_idle == 4


@pytest.mark.parametrize("number", range(6))
def test_an_interrupted_pass_changes_nothing(number: int):
    told = []
    for abort_at in (-1, number):
        machine = engine(FakeContext(n_seq_max=4, reply=b"hello", abort_at=abort_at))
        (answer,) = finish(machine, machine.submit(request("ask", max_tokens=6)))
        told.append([(beam.tokens, beam.score) for beam in answer.beams])
    assert told[0] == told[1]


def test_where_cells_run_out_the_best_so_far_is_told():
    context = FakeContext(n_ctx=30, n_seq_max=4, reply=b"a very long answer that does not fit")
    machine = engine(context)
    (answer,) = finish(machine, machine.submit(request("12345")))
    assert answer.finish == "context_full"
    assert answer.text == "a very long answer that does not fit"[: len(answer.tokens)]
    assert len(answer.tokens) > 5
    assert machine.ledger.n_idle == 4


def test_the_context_is_used_to_its_last_cell():
    machine = engine(FakeContext(n_ctx=12, n_seq_max=1, reply=b"a very long answer"))
    (answer,) = finish(machine, machine.submit(request("12345", beams=1)))
    assert (answer.text, answer.finish) == ("a very l", "context_full")


def test_a_stop_string_ends_an_answer_and_is_not_shown():
    machine = engine(FakeContext(n_seq_max=4, reply=b"one two three"))
    (answer,) = finish(machine, machine.submit(request("x", stops=(" two",))))
    assert (answer.text, answer.finish) == ("one", "stop")
    assert all(" two" not in beam.text for beam in answer.beams)


def test_no_tokens_are_no_answer():
    machine = engine(FakeContext(n_seq_max=4))
    (answer,) = finish(machine, machine.submit(request("x", max_tokens=0)))
    assert (answer.text, answer.finish, answer.beams) == ("", "length", ())


def test_a_search_and_other_answers_share_passes_and_each_is_as_alone():
    alone = engine(FakeContext(n_seq_max=4, reply=b"the same answer"))
    (expected,) = finish(alone, alone.submit(request("search", beams=3, max_tokens=9)))
    context = FakeContext(n_seq_max=4, reply=b"the same answer")
    machine = engine(context)
    search = machine.submit(request("search", beams=3, max_tokens=9))
    plain = [
        machine.submit(Request(tuple(text), GREEDY)) for text in (b"one", b"waits for its place")
    ]
    second = machine.submit(request("two", beams=4, max_tokens=3))
    found, *others, last = finish(machine, search, *plain, second)
    assert [(b.tokens, b.score) for b in found.beams] == [
        (b.tokens, b.score) for b in expected.beams
    ]
    assert [answer.text for answer in others] == ["the same answer"] * 2
    assert last.text == "the"
    assert max(context.batches) > 4


@pytest.mark.parametrize(
    ("context", "beams", "prompt", "message", "hint"),
    [
        (FakeContext(n_seq_max=2), 4, "x", "loaded for 2", "--beams 4"),
        (
            FakeContext(n_seq_max=4, is_recurrent=True),
            4,
            "x",
            "recurrent state",
            "leave out --beams",
        ),
        (
            FakeContext(n_ctx=1024, n_seq_max=4, n_swa=512),
            4,
            "x",
            "window of 512",
            "--ctx-size 512",
        ),
        (
            FakeContext(n_ctx=1024, n_seq_max=4, n_swa=100),
            4,
            "x",
            "window of 100",
            "leave out --beams",
        ),
        (FakeContext(n_ctx=64, n_seq_max=8), 8, "x" * 60, "each of 8 beams", "--ctx-size"),
    ],
)
def test_what_the_memory_cannot_hold_is_refused_before_the_search(
    context: FakeContext, beams: int, prompt: str, message: str, hint: str
):
    runner = fake_runner(context=context)
    with pytest.raises(UserError, match=message) as error:
        runner.reply(request(prompt, beams=beams))
    assert hint in error.value.hint
    assert context.batches == []


def test_a_window_that_never_moves_on_is_no_hindrance():
    machine = engine(FakeContext(n_ctx=128, n_seq_max=4, n_swa=128))
    (answer,) = finish(machine, machine.submit(request("ask", max_tokens=5)))
    assert answer.text == "hello"


def test_words_out_of_range_are_refused():
    for values in (
        {"beams": 0},
        {"beams": 257},
        {"beams": "1.5"},
        {"length_penalty": "nan"},
        {"length_penalty": 11},
        {"early_stopping": "maybe"},
    ):
        with pytest.raises(UserError) as error:
            BeamSettings().with_values(values)
        assert error.value.hint
