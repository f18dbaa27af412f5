"""Drafting: n-gram matches in a text, when drafts pay, and the measured cost of a pass."""

from contextlib import AbstractContextManager

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.draft_settings import DraftSettings, open_speculation, parse_ngram_draft
from llmcli.runtime.drafting import drafters
from llmcli.runtime.drafting.draft_length import MAX_LOSS_SHARE, DraftLength
from llmcli.runtime.drafting.ngram import LENGTH_CLASSES, MAX_LENGTH, NgramDrafts, PromptLookup
from llmcli.runtime.drafting.pass_cost import (
    INITIAL_SWITCH_COST,
    MEASURE_SECONDS,
    PassCost,
    measure_pass_cost,
)
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import FakeContext, FakeModel, FakeRow, fake_header

REQUEST = Request((0,), default_sampling())


def following(matches: NgramDrafts, tokens: list[int]) -> NgramDrafts:
    matches.follow(Sequence(1, REQUEST, None, 0, 0.0, tokens=tokens))  # type: ignore[arg-type]
    return matches


def test_every_drafter_starts_an_answer():
    assert "ngram" in drafters()
    for drafter in drafters().values():
        assert drafter.name


def test_what_followed_the_last_tokens_before_is_guessed_again():
    matches = following(PromptLookup().start(REQUEST, 0), [1, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert matches.draft(3).tokens == [5, 6, 9]
    assert (matches.length, len(matches.chances(8))) == (3, 8)


def test_nothing_is_guessed_where_nothing_stood_before():
    matches = following(PromptLookup().start(REQUEST, 0), list(range(20)))
    assert matches.chances(8) == []


def test_the_latest_occurrence_is_taken_and_its_length_counted_back():
    matches = following(
        PromptLookup().start(REQUEST, 0), [7, 1, 2, 3, 4, 8, 9, 1, 2, 3, 4, 6, 5, 9, 1, 2, 3, 4]
    )
    assert matches.draft(1).tokens == [6]
    assert matches.length == 5


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_guess_runs_on_beyond_the_end_of_the_text(period: int):
    tokens = [index % period for index in range(24)]
    assert following(PromptLookup().start(REQUEST, 0), tokens).draft(10).tokens == [
        index % period for index in range(24, 34)
    ]


def test_a_text_read_at_once_and_one_read_token_by_token_give_the_same_guesses():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, 300).tolist()
    whole, steps = PromptLookup().start(REQUEST, 0), PromptLookup().start(REQUEST, 0)
    following(whole, tokens[:200])
    for end in range(200, 300):
        following(whole, tokens[:end])
    for end in range(200, 300, 7):
        following(steps, tokens[:end])
    following(whole, tokens)
    following(steps, tokens)
    assert whole.draft(15) == steps.draft(15)
    assert whole.hits == steps.hits


def test_how_often_repetitions_went_on_becomes_the_chance_of_the_next():
    lookup = PromptLookup().start(REQUEST, 0)
    before = [lookup.chance(length) for length in range(MAX_LENGTH + 2)]
    assert before == sorted(before)
    for _ in range(300):
        lookup.record_continuation(3, False)
        lookup.record_continuation(12, True)
    assert lookup.chance(3) < 0.01
    assert lookup.chance(12) > 0.99
    assert lookup.chance(40) == pytest.approx(LENGTH_CLASSES[-1][1])


class Sure:
    """A drafter that is this sure of each guess."""

    def __init__(self, chance: float, cost: float = 0.0, text: float = 0.0) -> None:
        self.chance, self.price, self.text = chance, cost, text

    def chances(self, count: int) -> list[float]:
        return [self.chance] * count

    def cost_seconds(self, count: int) -> float:
        return count * self.price

    def reading_seconds(self) -> float:
        return self.text


# T(m) of the notes, 6.1: Q4_0, two slow cores. What pays there is in 8.3.
NOTES = {1: 1.0, 4: 2.7, 8: 4.57, 12: 6.67, 16: 7.78}


@pytest.mark.parametrize(
    ("chance", "rows"), [(0.5, 0), (0.7, 0), (0.8, 4), (0.85, 4), (0.95, 8), (1.0, 16)]
)
def test_as_many_are_guessed_as_the_curve_says_pays_most(chance: float, rows: int):
    pace = DraftLength(Steady(NOTES))
    pace.saved_tokens, pace.had_several_rows = 100.0, True
    assert pace.choose(Sure(chance), 100) == max(0, rows - 1)


def test_where_one_row_was_computed_last_it_must_pay_for_going_and_coming_back():
    pace = DraftLength(Steady(NOTES))
    pace.saved_tokens = 100.0
    assert pace.choose(Sure(0.8), 100) == 0


def test_a_dear_drafter_is_asked_less():
    pace = DraftLength(Steady(CHEAP))
    assert pace.choose(Sure(0.95), 100) == 15
    assert 0 < pace.choose(Sure(0.95, cost=0.3), 100) < 15
    assert pace.choose(Sure(0.95, cost=2.0), 100) == 0


@pytest.mark.parametrize(("chance", "tries"), [(0.85, 1), (1.0, 2)])
def test_no_more_is_risked_than_a_short_draft_a_fiftieth_of_the_answer_and_what_was_won(
    chance: float, tries: int
):
    pace = DraftLength(Steady(NOTES))
    first, lost, turned = tries * (NOTES[4] - 1 + INITIAL_SWITCH_COST), 0.0, False
    for _ in range(600):
        count = pace.choose(Sure(chance), 100)  # it says how sure it is, and is always wrong
        if count:
            rows = count + 1
            pace.record_draft(rows, 1, NOTES[rows], 0.0)
            lost += NOTES[rows] - 1 + (0 if turned else INITIAL_SWITCH_COST)
        else:
            pace.record_single(1.0)
        turned = count > 0
        assert lost <= max(first, MAX_LOSS_SHARE * (pace.n_tokens + 1)) + 1e-9
    assert lost > first
    pace.saved_tokens = 10.0
    assert pace.choose(Sure(1.0), 100) == 15


# T(m) of two fast cores: a long draft's failure costs what may be lost at once.
FAST = {1: 1.0, 4: 1.8, 8: 2.35, 12: 3.2, 16: 4.0}


def test_an_answer_whose_first_guesses_are_wrong_is_given_another_try():
    pace = DraftLength(Steady(FAST))
    for rows in (8, 4):
        assert pace.choose(Sure(0.95), 100) == rows - 1
        pace.record_draft(rows, 1, FAST[rows], 0.0)
    assert pace.choose(Sure(0.95), 100) == 0
    lucky = DraftLength(Steady(FAST))
    lucky.record_draft(4, 4, FAST[4], 0.0)
    assert lucky.choose(Sure(0.95), 100) > 3


def test_another_program_s_hiccup_does_not_end_the_guessing():
    pace = DraftLength(PassCost(FAST))
    pace.record_draft(4, 4, 100.0, 0.0)
    assert pace.choose(Sure(0.95), 100) > 0


def test_a_text_is_read_where_that_is_little_beside_what_it_took():
    short, long = DraftLength(Steady(CHEAP)), DraftLength(Steady(CHEAP))
    short.record_prompt(10.0)
    long.record_prompt(1000.0)
    assert short.choose(Sure(1.0, text=10.0), 100) == 0
    assert long.choose(Sure(1.0, text=10.0), 100) == 15
    long.record_draft(16, 1, 1.0, 10.0, 10.0)
    assert long.saved_tokens == pytest.approx(-INITIAL_SWITCH_COST)  # the prompt's time paid for it
    assert long.choose(Sure(1.0, text=20.0), 100) == 0
    long.saved_tokens = 10.0
    assert long.choose(Sure(1.0, text=20.0), 100) == 15


def test_no_more_is_guessed_than_asked_for():
    assert DraftLength(Steady(CHEAP)).choose(Sure(1.0), 2) == 2
    assert DraftLength(Steady(CHEAP)).choose(Sure(1.0), 0) == 0
    assert DraftLength(Steady(CHEAP), max_rows=4).choose(Sure(1.0), 100) == 3


def test_what_was_not_measured_is_told_from_its_neighbours():
    """Rows beyond a multiple of four cost as much as four more."""
    curve = PassCost({1: 1.0, 4: 2.5, 12: 6.5})
    assert [curve(rows) for rows in (1, 2, 4, 6, 8, 12, 13, 16)] == [
        1.0,
        2.5,
        2.5,
        4.5,
        4.5,
        6.5,
        8.5,
        8.5,
    ]
    assert PassCost({1: 2.0})(8) == 16.0


def test_the_curve_follows_what_passes_take_and_one_hiccup_does_not_move_it_far():
    curve = PassCost({1: 1.0, 4: 2.0})
    for _ in range(100):
        curve.record_pass(1, 1.5)
        curve.record_pass(4, 4.0)
    assert curve.single_seconds == pytest.approx(1.5, rel=0.01)
    assert curve(4) == pytest.approx(4.0, rel=0.01)
    curve.record_pass(1, 1000.0)
    assert curve.single_seconds < 1.7


@pytest.mark.parametrize("pace", [0.2, 5.0])
def test_when_the_machine_s_speed_changes_passes_of_any_rows_take_part(pace: float):
    """Only single rows are seen: what several would take now is told from them."""
    curve = PassCost({1: 1.0, 4: 2.8})
    for _ in range(100):
        curve.record_pass(1, pace)
    assert [curve(rows) for rows in (1, 4, 8)] == pytest.approx(
        [pace, 2.8 * pace, 5.2 * pace], rel=0.01
    )


def test_a_row_behind_several_tells_what_turning_costs_and_not_the_machine_s_speed():
    pace = DraftLength(PassCost(FAST))
    pace.pass_cost.switch_cost = 0.0
    for _ in range(200):
        pace.record_draft(4, 4, FAST[4], 0.0)
        pace.record_single(1.3)
    assert pace.pass_cost.switch_cost == pytest.approx(0.3, rel=0.01)
    assert pace.pass_cost.single_seconds == pytest.approx(1.0)


def test_more_rows_are_never_thought_cheaper_than_fewer():
    curve = PassCost({1: 1.0, 4: 2.8, 8: 2.0})
    assert curve(16) >= curve(8)
    for _ in range(100):
        curve.record_pass(4, 0.1)
    assert curve(4) >= curve(1) > 0


def test_passes_held_up_at_the_start_do_not_end_guessing_for_good():
    """T(4) looked like 3.3 T(1) and is 2: a short draft is tried once, and what it took is
    believed.
    """
    curve = PassCost({1: 1.0, 4: 3.3, 8: 6.0})
    assert DraftLength(curve).choose(Sure(0.9), 100) == 3
    for _ in range(2):
        curve.record_pass(4, 2.0)
        curve.single_seconds = 1.0
    assert curve.ratio(4) < 2.5
    assert curve.ratio(8) < 5  # held up as well
    assert DraftLength(curve).choose(Sure(0.9), 100) >= 3


def test_where_several_rows_are_dear_one_short_draft_is_tried_and_no_more():
    curve = PassCost({1: 1.0, 4: 3.3, 8: 6.0})
    pace = DraftLength(curve)
    tried = 0
    for _ in range(400):
        if pace.choose(Sure(0.9), 100):
            tried += 1
            pace.record_draft(4, 4, 3.3, 0.0)
        else:
            pace.record_single(1.0)
    assert tried == 1
    assert curve.ratio(4) == pytest.approx(3.3, rel=0.01)


class Sociable(FakeContext):
    """Rows whose logits depend on company where there are more than `equal` of them."""

    equal, n_vocab = 16, 260

    def decode(self, rows):
        found = super().decode(rows)
        return found if len(rows) <= self.equal else [FakeRow(row.logits + 1) for row in found]


@pytest.mark.parametrize(("equal", "seen"), [(16, 16), (8, 8), (11, 8), (1, 0)])
def test_the_measurement_leaves_the_context_empty_and_sees_whether_rows_are_equal(
    equal: int, seen: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmcli.runtime.drafting.pass_cost.MEASURE_SECONDS", 1e9)
    context = Sociable(n_ctx=256)
    context.equal = equal
    curve = measure_pass_cost(context)
    assert curve.exact_rows == seen
    assert set(curve.ratios) == {1, 4, 8, 12, 16}
    assert context.used == 0


def test_of_a_slow_model_no_more_is_measured_than_must_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmcli.runtime.drafting.pass_cost.MEASURE_SECONDS", 0.0)
    context = Sociable(n_ctx=256)
    assert set(measure_pass_cost(context).ratios) == {1, 4}
    assert context.batches == [1, 1, 1, 1, 1, 4]


class Slow(Sociable):
    """Each pass takes its time, by a clock of its own."""

    now = 0.0

    def decode(self, rows):
        self.now += 0.006 * FAST.get(len(rows), 1.0)
        return super().decode(rows)


def test_within_its_time_the_measurement_sees_every_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    context = Slow(n_ctx=256)
    monkeypatch.setattr("llmcli.runtime.drafting.pass_cost.time.perf_counter", lambda: context.now)
    assert measure_pass_cost(context).ratios == pytest.approx(FAST)
    assert context.batches[-8:] == [4, 8, 12, 16] * 2
    assert context.now < MEASURE_SECONDS


def test_what_is_wanted_decides_how_many_rows_of_logits_are_reserved():
    floats, quantized = RunOptions(), RunOptions(cache_type_k="q8_0", cache_type_v="q8_0")
    assert DraftSettings().max_outputs(floats, uses_gpu=False) == 1
    assert DraftSettings().max_outputs(quantized, uses_gpu=False) == 16
    assert DraftSettings().max_outputs(quantized, uses_gpu=True) == 1
    assert DraftSettings("off").max_outputs(quantized, uses_gpu=False) == 1
    assert DraftSettings("on").max_outputs(floats, uses_gpu=False) == 16


def guessing(
    wish: DraftSettings, context: FakeContext
) -> AbstractContextManager[Speculation | None]:
    return open_speculation(wish, fake_header(), FakeModel(), context, RunOptions(threads=1), 0)  # type: ignore[arg-type]


def test_by_itself_nothing_is_guessed_where_company_changes_logits():
    context = Sociable(n_ctx=256)
    context.equal = 1
    with guessing(DraftSettings(), context) as found:
        assert found is None


def test_recurrent_state_cannot_be_taken_back_and_who_asked_is_told():
    context = FakeContext(is_recurrent=True)
    with guessing(DraftSettings(), context) as found:
        assert found is None
    with (
        pytest.raises(UserError, match="recurrent") as error,
        guessing(DraftSettings("on"), context),
    ):
        pass
    assert "--ngram-draft" in error.value.hint


def test_words_that_are_none_of_the_three_are_refused():
    assert parse_ngram_draft("ON") == "on"
    with pytest.raises(UserError, match="ngram_draft") as error:
        parse_ngram_draft("perhaps")
    assert "auto, on, off" in error.value.hint
