"""Drafting: guesses from repetitions, the choice of a draft's length, and the measured cost of a
pass.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.draft_settings import (
    METHODS,
    NO_DRAFTING,
    DraftSettings,
    choose_drafting,
    parse_ngram_draft,
)
from llmcli.runtime.drafting import drafters
from llmcli.runtime.drafting.draft_length import MAX_LOSS_SHARE, DraftLength
from llmcli.runtime.drafting.gain.pass_cost import (
    INITIAL_SWITCH_COST,
    MEASURE_SECONDS,
    PassCost,
    measure_pass_cost,
)
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, chain_shape
from llmcli.runtime.drafting.ngram import (
    INDEX_TOKENS,
    LENGTH_CLASSES,
    MAX_LENGTH,
    NgramDrafts,
    PromptLookup,
)
from llmcli.runtime.open_speculation import DraftTarget, OpenedSpeculation, open_speculation
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling import default_sampling
from quant.model_file import read_header
from quant.model_file.model_header import ModelHeader
from quant.quantize import plan, write
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import FakeContext, FakeModel, FakeRow, fake_header
from tests.quant import tiny_gguf

REQUEST = Request((0,), default_sampling())


def chain(count: int) -> TreeShape:
    """Return the shape of a draft of `count` tokens."""
    return chain_shape([1.0] * count)


def follow(drafts: NgramDrafts, tokens: list[int]) -> NgramDrafts:
    """Let a drafter read these tokens, and return it."""
    drafts.follow(Sequence(1, REQUEST, None, 0, 0.0, tokens=tokens))  # type: ignore[arg-type]
    return drafts


def test_forced_text_is_not_counted_as_saved_by_drafts():
    """A pass of four rows, three of which the text needs anyway, yields one token."""
    draft_length = DraftLength(PassCost({1: 1.0, 4: 2.0, 8: 3.0}), 8)
    draft_length.had_several_rows = True  # so that no switch is charged
    draft_length.record_draft(4, 1, 2.0, 0.0, n_text_rows=3)
    assert draft_length.saved_tokens == pytest.approx(0)
    draft_length.record_draft(8, 2, 3.0, 0.0, n_text_rows=3)
    assert draft_length.saved_tokens == pytest.approx(0)


def test_each_method_has_a_drafter():
    methods = {name for name in METHODS if name not in ("auto", "off")}
    assert methods <= {drafter.name for drafter in drafters().values()}


def test_the_tokens_after_an_earlier_occurrence_are_guessed():
    drafts = follow(PromptLookup().start(REQUEST, 0), [1, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert drafts.draft(chain(3)).tree.tokens == (5, 6, 9)
    assert (drafts.length, len(drafts.shape(ShapeLimits(8, 8)))) == (3, 8)


def test_without_a_repetition_there_are_no_guesses():
    drafts = follow(PromptLookup().start(REQUEST, 0), list(range(20)))
    assert not drafts.shape(ShapeLimits(8, 8))


def test_the_latest_occurrence_is_used_and_its_length_counted():
    drafts = follow(
        PromptLookup().start(REQUEST, 0), [7, 1, 2, 3, 4, 8, 9, 1, 2, 3, 4, 6, 5, 9, 1, 2, 3, 4]
    )
    assert drafts.draft(chain(1)).tree.tokens == (6,)
    assert drafts.length == 5


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_guesses_continue_beyond_the_end_of_the_text(period: int):
    tokens = [index % period for index in range(24)]
    assert follow(PromptLookup().start(REQUEST, 0), tokens).draft(chain(10)).tree.tokens == tuple(
        index % period for index in range(24, 34)
    )


def test_a_text_read_at_once_gives_the_same_guesses_as_read_token_by_token():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, 300).tolist()
    at_once, stepwise = PromptLookup().start(REQUEST, 0), PromptLookup().start(REQUEST, 0)
    follow(at_once, tokens[:200])
    for end in range(200, 300):
        follow(at_once, tokens[:end])
    for end in range(200, 300, 7):
        follow(stepwise, tokens[:end])
    follow(at_once, tokens)
    follow(stepwise, tokens)
    assert at_once.draft(chain(15)) == stepwise.draft(chain(15))
    assert at_once.hits == stepwise.hits


def test_a_long_prompt_is_indexed_piece_by_piece_from_its_end():
    """After enough tokens of the answer, the index is the same as if it had been built at once."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 60, 3 * INDEX_TOKENS + 500).tolist()
    n_prompt = len(tokens) - 20
    sequence = Sequence(1, REQUEST, None, 0, 0.0, tokens=tokens[:n_prompt])
    drafts = PromptLookup().start(REQUEST, 0)
    n_indexed = []
    for token in (*tokens[n_prompt:], None):
        drafts.follow(sequence)
        n_indexed.append(drafts.n_unindexed)
        if token is not None:
            sequence.tokens.append(token)
    assert n_indexed[0] == n_prompt - 1 - INDEX_TOKENS + 2
    assert n_indexed[-1] == 0
    expected = {tuple(tokens[at : at + 3]): at + 3 for at in range(len(tokens) - 2)}
    assert drafts.position_after == expected


def test_the_chance_follows_how_often_repetitions_continued():
    drafts = PromptLookup().start(REQUEST, 0)
    initial_chances = [drafts.chance(length) for length in range(MAX_LENGTH + 2)]
    assert initial_chances == sorted(initial_chances)
    for _ in range(300):
        drafts.record_continuation(3, False)
        drafts.record_continuation(12, True)
    assert drafts.chance(3) < 0.01
    assert drafts.chance(12) > 0.99
    assert drafts.chance(40) == pytest.approx(LENGTH_CLASSES[-1][1])


def choose(draft_length: DraftLength, guesses: "FixedChance", limit: float) -> int:
    """Return the number of tokens of the best draft."""
    return len(draft_length.rate(guesses, limit)[1])  # type: ignore[arg-type]


class FixedChance:
    """A drafter state that reports the same chance for each guess. `cost`: seconds per guess.
    `reading`: seconds for reading the text.
    """

    def __init__(self, chance: float, cost: float = 0.0, reading: float = 0.0) -> None:
        self.chance, self.cost, self.reading = chance, cost, reading

    def shape(self, limits: ShapeLimits) -> TreeShape:
        return chain_shape([self.chance] * limits.chain_length)

    def cost_seconds(self, n_depths: int) -> float:
        return n_depths * self.cost

    def reading_seconds(self) -> float:
        return self.reading


# T(m) of Q4_0 on two slow cores (notes/runtime.md, 6.1; section 8.3 has the drafts that pay there)
SLOW_MACHINE = {1: 1.0, 4: 2.7, 8: 4.57, 12: 6.67, 16: 7.78}


@pytest.mark.parametrize(
    ("chance", "rows"), [(0.5, 0), (0.7, 0), (0.8, 4), (0.85, 4), (0.95, 8), (1.0, 16)]
)
def test_the_length_with_the_largest_expected_gain_is_chosen(chance: float, rows: int):
    draft_length = DraftLength(Steady(SLOW_MACHINE))
    draft_length.saved_tokens, draft_length.had_several_rows = 100.0, True
    assert choose(draft_length, FixedChance(chance), 100) == max(0, rows - 1)


def test_after_a_single_row_a_draft_must_also_pay_for_the_switch():
    draft_length = DraftLength(Steady(SLOW_MACHINE))
    draft_length.saved_tokens = 100.0
    assert choose(draft_length, FixedChance(0.8), 100) == 0


def test_the_drafter_s_cost_makes_drafts_shorter():
    draft_length = DraftLength(Steady(CHEAP))
    assert choose(draft_length, FixedChance(0.95), 100) == 15
    assert 0 < choose(draft_length, FixedChance(0.95, cost=0.3), 100) < 15
    assert choose(draft_length, FixedChance(0.95, cost=2.0), 100) == 0


@pytest.mark.parametrize(("chance", "tries"), [(0.85, 1), (1.0, 2)])
def test_the_loss_is_limited_to_a_short_draft_or_a_share_of_the_answer_plus_savings(
    chance: float, tries: int
):
    draft_length = DraftLength(Steady(SLOW_MACHINE))
    first, lost, had_draft = tries * (SLOW_MACHINE[4] - 1 + INITIAL_SWITCH_COST), 0.0, False
    for _ in range(600):
        count = choose(draft_length, FixedChance(chance), 100)  # all guesses will be wrong
        if count:
            rows = count + 1
            draft_length.record_draft(rows, 1, SLOW_MACHINE[rows], 0.0)
            lost += SLOW_MACHINE[rows] - 1 + (0 if had_draft else INITIAL_SWITCH_COST)
        else:
            draft_length.record_single(1.0)
        had_draft = count > 0
        assert lost <= max(first, MAX_LOSS_SHARE * (draft_length.n_tokens + 1)) + 1e-9
    assert lost > first
    draft_length.saved_tokens = 10.0
    assert choose(draft_length, FixedChance(1.0), 100) == 15


# T(m) on two fast cores, where a wrong long draft costs as much as one draft may lose
FAST_MACHINE = {1: 1.0, 4: 1.8, 8: 2.35, 12: 3.2, 16: 4.0}


def test_after_a_wrong_long_draft_a_short_one_is_tried():
    draft_length = DraftLength(Steady(FAST_MACHINE))
    for rows in (8, 4):
        assert choose(draft_length, FixedChance(0.95), 100) == rows - 1
        draft_length.record_draft(rows, 1, FAST_MACHINE[rows], 0.0)
    assert choose(draft_length, FixedChance(0.95), 100) == 0
    successful = DraftLength(Steady(FAST_MACHINE))
    successful.record_draft(4, 4, FAST_MACHINE[4], 0.0)
    assert choose(successful, FixedChance(0.95), 100) > 3


def test_a_pass_slowed_down_by_another_program_does_not_end_drafting():
    draft_length = DraftLength(PassCost(FAST_MACHINE))
    draft_length.record_draft(4, 4, 100.0, 0.0)
    assert choose(draft_length, FixedChance(0.95), 100) > 0


def test_the_drafter_reads_the_text_only_if_that_is_short_compared_with_the_prompt():
    short, long = DraftLength(Steady(CHEAP)), DraftLength(Steady(CHEAP))
    short.record_prompt(10.0)
    long.record_prompt(1000.0)
    assert choose(short, FixedChance(1.0, reading=10.0), 100) == 0
    assert choose(long, FixedChance(1.0, reading=10.0), 100) == 15
    long.record_draft(16, 1, 1.0, 10.0, 10.0)
    assert long.saved_tokens == pytest.approx(
        -INITIAL_SWITCH_COST
    )  # reading was paid from the prompt's budget
    assert choose(long, FixedChance(1.0, reading=20.0), 100) == 0
    long.saved_tokens = 10.0
    assert choose(long, FixedChance(1.0, reading=20.0), 100) == 15


def test_the_length_of_a_draft_is_limited():
    assert choose(DraftLength(Steady(CHEAP)), FixedChance(1.0), 2) == 2
    assert choose(DraftLength(Steady(CHEAP)), FixedChance(1.0), 0) == 0
    assert choose(DraftLength(Steady(CHEAP), max_rows=4), FixedChance(1.0), 100) == 3


def test_a_draft_with_a_checkpoint_must_also_pay_for_it():
    cost = Steady(CHEAP)
    draft_length = DraftLength(cost, max_free_guesses=3)
    draft_length.saved_tokens = 100.0
    assert choose(draft_length, FixedChance(0.99), 100) == 15
    cost.record_checkpoint(12.0)
    assert choose(draft_length, FixedChance(0.99), 100) == 3
    draft_length.refuse_checkpoints()
    cost.checkpoint_seconds = 0.0
    assert choose(draft_length, FixedChance(0.99), 100) == 3


def test_costs_of_other_numbers_of_rows_are_interpolated():
    """Rows beyond a multiple of four cost as much as the next multiple."""
    pass_cost = PassCost({1: 1.0, 4: 2.5, 12: 6.5})
    assert [pass_cost(rows) for rows in (1, 2, 4, 6, 8, 12, 13, 16)] == [
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


def test_the_cost_follows_recorded_passes_but_one_slow_pass_changes_it_little():
    pass_cost = PassCost({1: 1.0, 4: 2.0})
    for _ in range(100):
        pass_cost.record_pass(1, 1.5)
        pass_cost.record_pass(4, 4.0)
    assert pass_cost.single_seconds == pytest.approx(1.5, rel=0.01)
    assert pass_cost(4) == pytest.approx(4.0, rel=0.01)
    pass_cost.record_pass(1, 1000.0)
    assert pass_cost.single_seconds < 1.7


@pytest.mark.parametrize("single_seconds", [0.2, 5.0])
def test_a_change_of_the_machine_s_speed_changes_the_cost_of_all_numbers_of_rows(
    single_seconds: float,
):
    """Only passes of one row are recorded; the cost of several rows follows from them."""
    pass_cost = PassCost({1: 1.0, 4: 2.8})
    for _ in range(100):
        pass_cost.record_pass(1, single_seconds)
    assert [pass_cost(rows) for rows in (1, 4, 8)] == pytest.approx(
        [single_seconds, 2.8 * single_seconds, 5.2 * single_seconds], rel=0.01
    )


def test_a_single_row_after_several_changes_the_switch_cost_and_not_the_speed():
    draft_length = DraftLength(PassCost(FAST_MACHINE))
    draft_length.pass_cost.switch_cost = 0.0
    for _ in range(200):
        draft_length.record_draft(4, 4, FAST_MACHINE[4], 0.0)
        draft_length.record_single(1.3)
    assert draft_length.pass_cost.switch_cost == pytest.approx(0.3, rel=0.01)
    assert draft_length.pass_cost.single_seconds == pytest.approx(1.0)


def test_more_rows_never_cost_less_than_fewer():
    pass_cost = PassCost({1: 1.0, 4: 2.8, 8: 2.0})
    assert pass_cost(16) >= pass_cost(8)
    for _ in range(100):
        pass_cost.record_pass(4, 0.1)
    assert pass_cost(4) >= pass_cost(1) > 0


def test_a_measurement_that_was_slowed_down_does_not_prevent_drafting():
    """T(4) was measured as 3.3 T(1) but is 2 T(1). A short draft is tried once, and its time
    corrects the cost.
    """
    pass_cost = PassCost({1: 1.0, 4: 3.3, 8: 6.0})
    assert choose(DraftLength(pass_cost), FixedChance(0.9), 100) == 3
    for _ in range(2):
        pass_cost.record_pass(4, 2.0)
        pass_cost.single_seconds = 1.0
    assert pass_cost.ratio(4) < 2.5
    assert pass_cost.ratio(8) < 5  # corrected by the same factor
    assert choose(DraftLength(pass_cost), FixedChance(0.9), 100) >= 3


def test_if_several_rows_are_expensive_only_one_short_draft_is_tried():
    pass_cost = PassCost({1: 1.0, 4: 3.3, 8: 6.0})
    draft_length = DraftLength(pass_cost)
    tried = 0
    for _ in range(400):
        if choose(draft_length, FixedChance(0.9), 100):
            tried += 1
            draft_length.record_draft(4, 4, 3.3, 0.0)
        else:
            draft_length.record_single(1.0)
    assert tried == 1
    assert pass_cost.ratio(4) == pytest.approx(3.3, rel=0.01)


class RowDependentContext(FakeContext):
    """A context that computes other logits in passes of more than `exact_rows` rows."""

    exact_rows, n_vocab = 16, 260

    def decode(self, rows):
        found = super().decode(rows)
        return found if len(rows) <= self.exact_rows else [FakeRow(row.logits + 1) for row in found]


@pytest.mark.parametrize(("exact_rows", "expected"), [(16, 16), (8, 8), (11, 8), (1, 0)])
def test_the_measurement_empties_the_context_and_finds_the_exact_rows(
    exact_rows: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmcli.runtime.drafting.gain.pass_cost.MEASURE_SECONDS", 1e9)
    context = RowDependentContext(n_ctx=256)
    context.exact_rows = exact_rows
    pass_cost = measure_pass_cost(context)
    assert pass_cost.exact_rows == expected
    assert set(pass_cost.ratios) == {1, 4, 8, 12, 16}
    assert context.used == 0


def test_a_slow_model_is_measured_with_as_few_passes_as_possible(monkeypatch: pytest.MonkeyPatch):
    for name in ("MEASURE_SECONDS", "MEASURE_PASSES"):
        monkeypatch.setattr(f"llmcli.runtime.drafting.gain.pass_cost.{name}", 0.0)
    clock = count()  # every pass takes a second
    monkeypatch.setattr(
        "llmcli.runtime.drafting.gain.pass_cost.time.perf_counter", lambda: float(next(clock))
    )
    context = RowDependentContext(n_ctx=256)
    assert set(measure_pass_cost(context).ratios) == {1, 4}
    assert context.batches == [1, 1, 1, 1, 1, 4]


class SlowContext(RowDependentContext):
    """A context whose passes advance a fake clock."""

    now, costs = 0.0, FAST_MACHINE

    def decode(self, rows):
        self.now += 0.006 * self.costs.get(len(rows), 1.0)
        return super().decode(rows)


def test_a_fast_model_is_measured_with_every_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    context = SlowContext(n_ctx=256)
    monkeypatch.setattr(
        "llmcli.runtime.drafting.gain.pass_cost.time.perf_counter", lambda: context.now
    )
    assert measure_pass_cost(context).ratios == pytest.approx(FAST_MACHINE)
    assert context.batches[-9:] == [4, 4, 16, 8, 12, 4, 8, 12, 16]
    assert context.now < MEASURE_SECONDS


# T(m) / T(1) of Qwen2.5-Coder 1.5B Q4_K_M on one core: 16 rows cost hardly more than 8.
COSTS_OF_1B = {1: 1.0, 4: 3.42, 8: 8.1, 12: 10.5, 16: 9.26}


class LargeModelContext(RowDependentContext):
    """A context whose passes take COSTS_OF_1B times `single_seconds` of a fake clock."""

    now, single_seconds = 0.0, 0.057

    def decode(self, rows):
        self.now += self.single_seconds * COSTS_OF_1B[len(rows)]
        return super().decode(rows)


@pytest.mark.parametrize(
    ("single_seconds", "measured"),
    [(0.003, {1, 4, 8, 12, 16}), (0.057, {1, 4, 8, 16}), (0.08, {1, 4, 16}), (0.5, {1, 4})],
)
def test_the_time_of_the_measurement_grows_with_the_model(
    single_seconds: float, measured: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = LargeModelContext(n_ctx=256)
    context.single_seconds = single_seconds
    monkeypatch.setattr(
        "llmcli.runtime.drafting.gain.pass_cost.time.perf_counter", lambda: context.now
    )
    cost = measure_pass_cost(context)
    assert set(cost.ratios) == measured
    assert cost.exact_rows == (16 if len(measured) == 5 else 8 if 8 in measured else 4)
    assert context.now < max(MEASURE_SECONDS, 2.0) + 12 * single_seconds
    if 16 in measured:  # extrapolated from four rows it would be 13
        assert cost.ratio(16) == pytest.approx(COSTS_OF_1B[16], rel=0.01)
        assert 16 / cost.ratio(16) > 1.7 > 4 / cost.ratio(4)


class DisturbedContext(LargeModelContext):
    """A context whose first pass of four rows another program slows down."""

    disturbed = False

    def decode(self, rows):
        if len(rows) == 4 and not self.disturbed:
            self.disturbed = True
            self.now += 1.0
        return super().decode(rows)


def test_one_disturbed_pass_of_a_large_model_does_not_turn_drafting_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = DisturbedContext(n_ctx=256)
    monkeypatch.setattr(
        "llmcli.runtime.drafting.gain.pass_cost.time.perf_counter", lambda: context.now
    )
    assert measure_pass_cost(context).ratio(4) == pytest.approx(COSTS_OF_1B[4])


def header(path: Path, kind: str, experts: int = 0) -> ModelHeader:
    """Return the header of a tiny model whose weights are of this type, but those that choose
    experts.
    """
    source = write.open_gguf(tiny_gguf.llama(path.with_suffix(".f32"), layers=1, experts=experts))
    write.write_model(plan.plan_quantization(source, kind), path, threads=1)
    return read_header.read_header(path)


def test_the_settings_decide_how_many_rows_of_logits_are_reserved(tmp_path: Path) -> None:
    model = header(tmp_path / "m.gguf", "Q8_0")
    floats, quantized = RunOptions(), RunOptions(cache_type_k="q8_0", cache_type_v="q8_0")
    assert DraftSettings().max_outputs(model, floats, uses_gpu=False) == 1
    assert DraftSettings().max_outputs(model, quantized, uses_gpu=False) == 16
    assert DraftSettings().max_outputs(model, quantized, uses_gpu=True) == 1
    assert DraftSettings("off").max_outputs(model, quantized, uses_gpu=False) == 1
    assert DraftSettings("on").max_outputs(model, floats, uses_gpu=False) == 16


@pytest.mark.parametrize(("kind", "experts"), [("F32", 0), ("F16", 0), ("Q8_0", 2)])
def test_nothing_is_reserved_where_float_weights_round_differently(
    tmp_path: Path, kind: str, experts: int
) -> None:
    """With --reproducible such weights get single tokens."""
    model = header(tmp_path / "m.gguf", kind, experts)
    options = RunOptions(cache_type_k="q8_0", cache_type_v="q8_0")
    assert DraftSettings().max_outputs(model, options, uses_gpu=False) == 1
    assert DraftSettings("on").max_outputs(model, options, uses_gpu=False) == 16
    same = replace(options, reproducible=True)
    assert DraftSettings().max_outputs(model, same, uses_gpu=False) == 16


def test_ngram_draft_on_allows_one_method_without_a_draft_file() -> None:
    ngram, both = DraftSettings("on", method="ngram"), DraftSettings("on")
    for has_file in (False, True):
        assert choose_drafting("ngram", "auto", has_file=has_file) == ngram
        assert choose_drafting("auto", "off", has_file=has_file) == DraftSettings("off")
        assert choose_drafting("off", "auto", has_file=has_file) == NO_DRAFTING
        assert choose_drafting("pool", "auto", has_file=has_file) == DraftSettings(method="pool")
    assert choose_drafting("auto", "on", has_file=False) == ngram
    assert choose_drafting("auto", "on", has_file=True) == both


def open_drafting(
    settings: DraftSettings, context: FakeContext, *, reproducible: bool = False
) -> AbstractContextManager[OpenedSpeculation]:
    """Open the speculation that these settings give with a fake model."""
    options = RunOptions(threads=1, reproducible=reproducible)
    target = DraftTarget(fake_header(), FakeModel(), context, options, ON_HOST)  # type: ignore[arg-type]
    return open_speculation(settings, target)


def test_drafting_is_off_by_default_if_logits_depend_on_the_number_of_rows():
    context = RowDependentContext(n_ctx=256)
    context.exact_rows = 1
    with open_drafting(DraftSettings(), context) as (found, *_):
        assert found is None


def test_the_reason_for_no_drafts_is_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 4 to 16 tokens take as long as the same tokens one by one; or their logits differ
    where these must not.
    """
    slow = {rows: 0.97 * rows for rows in FAST_MACHINE} | {1: 1.0}
    context = SlowContext(n_ctx=256)
    monkeypatch.setattr(SlowContext, "costs", slow)
    monkeypatch.setattr(
        "llmcli.runtime.drafting.gain.pass_cost.time.perf_counter", lambda: context.now
    )
    with open_drafting(DraftSettings("on"), context) as (found, reason, _):
        assert found is None
        assert reason == (
            "on this machine a pass over 4 tokens takes 3.9 times as long as one over a single token"
        )
    context.exact_rows = 1
    with open_drafting(DraftSettings("on"), context, reproducible=True) as (found, reason, _):
        assert found is None
        assert reason.startswith("with --reproducible a draft must not change the logits")
    with open_drafting(NO_DRAFTING, context) as off:
        assert off == (None, "", None)


def test_recurrent_state_can_be_drafted_for(monkeypatch: pytest.MonkeyPatch):
    context = SlowContext(n_ctx=256, is_recurrent=True)
    monkeypatch.setattr(
        "llmcli.runtime.drafting.gain.pass_cost.time.perf_counter", lambda: context.now
    )
    with open_drafting(DraftSettings("on"), context) as (found, reason, _):
        assert found is not None and found.drafters and not reason


def test_an_unknown_mode_is_refused():
    assert parse_ngram_draft("ON") == "on"
    with pytest.raises(UserError, match="ngram_draft") as error:
        parse_ngram_draft("perhaps")
    assert "auto, on, off" in error.value.hint
