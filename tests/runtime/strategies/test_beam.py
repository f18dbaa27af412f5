"""Beam search: its cells and slots, the order of its answers, and interruptions."""

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


class ScoredContext(FakeContext):
    """A context whose logits depend on the tokens so far: `scores` returns the logits of some
    tokens, and those of all others are 0.
    """

    def __init__(self, scores: Callable[[list[int]], dict[int, float]], **more: int) -> None:
        super().__init__(**more)
        self.scores = scores

    def _logits(self, tokens: Sequence[int]) -> np.ndarray:
        logits = np.zeros(N_VOCAB, np.float32)
        for token, value in self.scores(list(tokens)).items():
            logits[token] = value
        return logits


def make_engine(context: FakeContext) -> Engine:
    model = FakeModel()
    return Engine(context, model, None)


def request(text: str, beams: int = 4, **more) -> Request:
    search = BeamSettings(beams, more.pop("length_penalty", 1.0), more.pop("early_stopping", "no"))
    return Request(tuple(text.encode()), GREEDY, strategy="beam", search=search, **more)


def finish(engine: Engine, *ids: int) -> list[Answer]:
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    return [engine.pop_answer(one) for one in ids]


def cell_counts(context: FakeContext) -> list[int]:
    """Return the number of cells of each sequence."""
    return [len(cells) for cells in context.cells]


def test_every_step_is_a_pass_with_one_row_per_beam_on_shared_cells():
    context = FakeContext(n_seq_max=4, reply=b"a longer answer")
    engine = make_engine(context)
    engine.submit(request("the prompt", max_tokens=12))
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
        # the cells are a tree of prefixes, in which each token is stored once
        tree = {
            tuple(token for _, token in cells[: end + 1])
            for cells in context.cells
            for end in range(len(cells))
        }
        assert context.used == engine.ledger.used_cells == len(tree)
    assert context.batches == [10] + [4] * 11


def test_only_the_cells_of_the_best_answer_stay_cached():
    context = FakeContext(n_seq_max=4)
    engine = make_engine(context)
    (answer,) = finish(engine, engine.submit(request("ask")))
    assert (answer.text, answer.finish) == ("hello", "stop")
    assert sorted(cell_counts(context)) == [0, 0, 0, len("ask") + len(answer.text)]
    assert engine.ledger.n_idle == 4
    (again,) = finish(engine, engine.submit(request("ask" + answer.text + " more")))
    assert again.cached_tokens == len("ask" + answer.text)


def test_answers_are_sorted_by_score_and_distinct():
    engine = make_engine(FakeContext(n_seq_max=4, reply=b"hello world"))
    (answer,) = finish(engine, engine.submit(request("ask", max_tokens=8)))
    scores = [beam.score for beam in answer.beams]
    assert scores == sorted(scores, reverse=True)
    assert len({beam.tokens for beam in answer.beams}) == 4
    assert [token.id for token in answer.tokens] == list(answer.beams[0].tokens)
    assert {token.constraint_ms for token in answer.tokens} == {0.0}
    assert answer.beams[0].score == pytest.approx(
        sum(token.logprob or 0 for token in answer.tokens) / 8
    )


def test_equal_scores_are_ordered_by_beam_and_then_by_token():
    engine = make_engine(ScoredContext(lambda tokens: {5: 9, 7: 9, 8: 9}, n_seq_max=2))
    (answer,) = finish(engine, engine.submit(request("x", beams=2, max_tokens=2)))
    assert [beam.tokens for beam in answer.beams] == [(5, 5), (5, 7)]


def test_end_token_that_is_not_among_the_best_candidates_ends_no_answer():
    # The end token ranks third. With two beams it ends no answer, with three it does.
    engine = make_engine(ScoredContext(lambda tokens: {1: 9, 2: 8.9, EOS: 8.8}, n_seq_max=3))
    (two,) = finish(engine, engine.submit(request("x", beams=2, max_tokens=1)))
    (three,) = finish(engine, engine.submit(request("x", beams=3, max_tokens=1)))
    assert [beam.tokens for beam in two.beams] == [(1,), (2,)]
    assert [beam.tokens for beam in three.beams] == [(1,), (2,), ()]


def test_length_penalty_decides_between_short_and_long_answers():
    def scores(tokens: list[int]) -> dict[int, float]:
        return {1: 8.0, EOS: 8.5} if len(tokens) < 5 else {EOS: 20.0}

    best_tokens = []
    for penalty in (0.0, 3.0):
        engine = make_engine(ScoredContext(scores, n_seq_max=2))
        search_request = request(
            "x", beams=2, length_penalty=penalty, early_stopping="never", max_tokens=10
        )
        best_tokens.append(finish(engine, engine.submit(search_request))[0].beams[0].tokens)
    assert best_tokens == [(), (1, 1, 1, 1)]


def test_early_stopping_ends_when_there_are_as_many_answers_as_beams():
    passes = []
    for early in ("yes", "never"):
        context = ScoredContext(lambda tokens: {1: 9.0, EOS: 8.9}, n_seq_max=2)
        engine = make_engine(context)
        search_request = request(
            "x", beams=2, length_penalty=1.0, early_stopping=early, max_tokens=30
        )
        (answer,) = finish(engine, engine.submit(search_request))
        assert len(answer.beams) == 2
        passes.append(len(context.batches))
    assert passes[0] < passes[1]


def test_cancelled_search_returns_the_best_answers_so_far_and_frees_its_cells():
    context = FakeContext(n_seq_max=4, reply=b"hello world")
    engine = make_engine(context)
    one = engine.submit(request("q"))
    for _ in range(4):
        engine.step()
    engine.cancel(one)
    (answer,) = finish(engine, one)
    assert (answer.text, answer.finish, len(answer.beams)) == ("hell", "cancelled", 4)
    assert cell_counts(context).count(0) == 3
    assert engine.ledger.n_idle == 4


def test_search_cancelled_in_its_prompt_has_no_answers():
    context = FakeContext(n_seq_max=4, n_batch=8)
    engine = make_engine(context)
    one = engine.submit(request("a prompt of several passes"))
    engine.step()
    engine.cancel(one)
    (answer,) = finish(engine, one)
    assert (answer.text, answer.finish, answer.beams) == ("", "cancelled", ())
    assert engine.ledger.n_idle == 4


@pytest.mark.parametrize("number", range(6))
def test_interrupted_pass_is_repeated_without_effect_on_the_answers(number: int):
    results = []
    for abort_at in (-1, number):
        engine = make_engine(FakeContext(n_seq_max=4, reply=b"hello", abort_at=abort_at))
        (answer,) = finish(engine, engine.submit(request("ask", max_tokens=6)))
        results.append([(beam.tokens, beam.score) for beam in answer.beams])
    assert results[0] == results[1]


def test_full_context_ends_the_search_with_the_best_answers_so_far():
    context = FakeContext(n_ctx=30, n_seq_max=4, reply=b"a very long answer that does not fit")
    engine = make_engine(context)
    (answer,) = finish(engine, engine.submit(request("12345")))
    assert answer.finish == "context_full"
    assert answer.text == "a very long answer that does not fit"[: len(answer.tokens)]
    assert len(answer.tokens) > 5
    assert engine.ledger.n_idle == 4


def test_context_is_used_to_its_last_cell():
    engine = make_engine(FakeContext(n_ctx=12, n_seq_max=1, reply=b"a very long answer"))
    (answer,) = finish(engine, engine.submit(request("12345", beams=1)))
    assert (answer.text, answer.finish) == ("a very l", "context_full")


def test_stop_string_ends_an_answer_and_is_not_shown():
    engine = make_engine(FakeContext(n_seq_max=4, reply=b"one two three"))
    (answer,) = finish(engine, engine.submit(request("x", stops=(" two",))))
    assert (answer.text, answer.finish) == ("one", "stop")
    assert all(" two" not in beam.text for beam in answer.beams)


def test_limit_of_0_tokens_gives_no_answers():
    engine = make_engine(FakeContext(n_seq_max=4))
    (answer,) = finish(engine, engine.submit(request("x", max_tokens=0)))
    assert (answer.text, answer.finish, answer.beams) == ("", "length", ())


def test_search_and_other_answers_share_passes_without_effect_on_each_other():
    alone = make_engine(FakeContext(n_seq_max=4, reply=b"the same answer"))
    (expected,) = finish(alone, alone.submit(request("search", beams=3, max_tokens=9)))
    context = FakeContext(n_seq_max=4, reply=b"the same answer")
    engine = make_engine(context)
    search = engine.submit(request("search", beams=3, max_tokens=9))
    plain = [
        engine.submit(Request(tuple(text), GREEDY)) for text in (b"one", b"waits for its place")
    ]
    second = engine.submit(request("two", beams=4, max_tokens=3))
    found, *others, last = finish(engine, search, *plain, second)
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
        (FakeContext(n_seq_max=4, n_batch=2), 3, "x", "at most 2", "--ubatch-size 3"),
        (FakeContext(n_ctx=64, n_seq_max=8), 8, "x" * 60, "each of 8 beams", "--ctx-size"),
    ],
)
def test_search_that_the_context_cannot_run_is_refused(
    context: FakeContext, beams: int, prompt: str, message: str, hint: str
):
    runner = fake_runner(context=context)
    with pytest.raises(UserError, match=message) as error:
        runner.reply(request(prompt, beams=beams))
    assert hint in error.value.hint
    assert context.batches == []


def test_search_runs_if_the_sliding_window_covers_the_context():
    engine = make_engine(FakeContext(n_ctx=128, n_seq_max=4, n_swa=128))
    (answer,) = finish(engine, engine.submit(request("ask", max_tokens=5)))
    assert answer.text == "hello"


def test_invalid_settings_are_refused():
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
