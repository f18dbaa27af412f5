"""Tests with several sequences in one batch, and depths that are computed only once."""

from types import SimpleNamespace

import numpy as np
import pytest

from llmcli.bench.speed import depth_states, measure
from llmcli.bench.speed.depth_states import DepthStates
from llmcli.bench.speed.parameter_grid import ParameterGrid
from llmcli.bench.speed.parameter_grid import SpeedTest as Case
from llmcli.bench.speed.random_passes import RandomPasses
from llmcli.bench.speed.run import SpeedSettings, run_tests
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.ui import UI
from tests.quant import tiny_gguf


class RecordingContext:
    """A context that records the batches it prepares."""

    n_batch, n_vocab = 8, 100

    def __init__(self) -> None:
        self.rows: list[BatchRows] = []

    def prepare(self, rows):
        self.rows.append(rows)
        return lambda: None


def make_passes():
    context = RecordingContext()
    model = SimpleNamespace(add_bos=True, bos=7)
    return context, RandomPasses(context, model, sequences=3)


def test_prompts_are_computed_in_order_and_have_logits_for_their_last_token():
    context, passes = make_passes()
    passes.prompt_passes(0, 5)
    cells = [
        (s, p) for rows in context.rows for s, p in zip(rows.sequences, rows.positions, strict=True)
    ]
    assert cells == [(s, p) for s in range(3) for p in range(5)]
    assert [len(rows) for rows in context.rows] == [8, 7]
    cells_with_logits = [
        cell
        for rows in context.rows
        for cell, wants_logits in zip(
            zip(rows.sequences, rows.positions, strict=True), rows.wants_logits, strict=True
        )
        if wants_logits
    ]
    # the last token of each prompt, and of each batch as in llama-bench
    assert cells_with_logits == [(0, 4), (1, 2), (1, 4), (2, 4)]
    first_tokens = [
        rows.tokens[i] for rows in context.rows for i, p in enumerate(rows.positions) if p == 0
    ]
    assert first_tokens == [7, 7, 7]


def test_a_generation_pass_has_one_token_of_every_sequence():
    context, passes = make_passes()
    passes.token_passes(5, 2)
    assert [(rows.sequences, rows.positions, rows.wants_logits) for rows in context.rows] == [
        ((0, 1, 2), (5, 5, 5), (True,) * 3), ((0, 1, 2), (6, 6, 6), (True,) * 3),
    ]  # fmt: skip


def test_rates_count_the_tokens_of_all_sequences(stories_gguf):
    grid = ParameterGrid(
        [24], [4], [(8, 2)], [0, 16], [32], [16], ["f16"], ["f16"], [1], [-1], ["auto"], [1, 3]
    )
    results = run_tests(stories_gguf, list(grid.tests()), SpeedSettings(2), UI())
    assert [result.title for result in results] == [
        "pp24",
        "tg4",
        "pp8+tg2",
        "pp24 x3",
        "tg4 x3",
        "pp8+tg2 x3",
        "pp24 @ d16",
        "tg4 @ d16",
        "pp8+tg2 @ d16",
        "pp24 @ d16 x3",
        "tg4 @ d16 x3",
        "pp8+tg2 @ d16 x3",
    ]
    for result in results:
        count = (result.test.n_prompt + result.test.n_gen) * result.test.n_parallel
        assert result.samples_ts == pytest.approx([count * 1e9 / ns for ns in result.samples_ns])
        assert result.each_ts == pytest.approx(sum(result.samples_ts) / 2 / result.test.n_parallel)
        assert len(result.tokens_ms) == 2 * result.test.n_gen  # one time per step of all sequences


def test_sliding_window_and_recurrent_models_run_with_several_sequences_and_depths(tmp_path):
    for path in (
        tiny_gguf.gemma3(tmp_path / "g.gguf", hidden=64, layers=6),
        tiny_gguf.mamba(tmp_path / "m.gguf"),
    ):
        grid = ParameterGrid(
            [20], [3], [], [0, 40], [64], [32], ["f16"], ["f16"], [1], [-1], ["auto"], [2]
        )
        assert len(run_tests(path, list(grid.tests()), SpeedSettings(2), UI())) == 4


@pytest.fixture
def case():
    return Case(8, 0, 40, 32, 32, "f16", "f16", 1, -1, "auto", 2)


def test_a_depth_is_computed_once_for_all_repetitions_sequences_and_tests(
    stories_gguf, case, monkeypatch
):
    computed: list[tuple[int, int]] = []
    compute = DepthStates._compute

    def counted(self, context, model, count, sequences):
        computed.append((count, sequences))
        compute(self, context, model, count, sequences)

    monkeypatch.setattr(depth_states.DepthStates, "_compute", counted)
    grid = ParameterGrid(
        [8], [2], [], [40], [32], [32], ["f16"], ["f16", "f32"], [1], [-1], ["on"], [2]
    )
    run_tests(stories_gguf, list(grid.tests()), SpeedSettings(3), UI())
    assert computed == [(40, 1)] * 2  # once for each cache type


def test_a_restored_state_gives_the_same_logits(stories_gguf, case):
    depths = DepthStates()
    with open_model(stories_gguf) as model, measure.open_trial(model, case, depths) as trial:
        rows = BatchRows([5, 5], [40, 40], [0, 1], [True, True])
        logits = []
        for _ in range(2):
            trial.restore_depth()
            assert [trial.context.last_position(one) for one in (0, 1)] == [39, 39]
            logits.append([row.logits.copy() for row in trial.context.decode(rows)])
        for one in (logits[0][1], *logits[1]):
            np.testing.assert_allclose(one, logits[0][0], atol=1e-3)


def test_a_state_that_cannot_be_restored_is_computed_again(stories_gguf, case):
    depths = DepthStates()
    with open_model(stories_gguf) as model, measure.open_trial(model, case, depths) as trial:
        trial.restore_depth()
        depths._state = depths._state[: len(depths._state) // 2]
        trial.restore_depth()
        assert [trial.context.last_position(one) for one in (0, 1)] == [39, 39]
        trial.measure_once()
