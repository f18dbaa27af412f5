"""The interleaved comparison on real models: depths, settling, memory and interruption."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.bench.compare import interleaved
from llmcli.bench.compare.interleaved import (
    GenerationMeasurement,
    MeasurementSize,
    ModelTest,
    PromptMeasurement,
    plan_measurement,
)
from llmcli.bench.speed import parameter_grid
from llmcli.bench.statistics.paired_test import Design
from llmcli.hardware import host
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.ui import UI
from quant.errors import UserError
from tests.quant import tiny_gguf

TG = parameter_grid.SpeedTest(0, 6, 0, 64, 64, "f16", "f16", 1, 0, "auto")
QUICK = Design(seconds=0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(
        tmp_path_factory.mktemp("sides") / "tiny.gguf", hidden=64, ff=128, layers=2
    )


@pytest.mark.parametrize("depth", [0, 5])
def test_generation_restarts_at_its_depth_when_its_tokens_are_used_up(model: Path, depth: int):
    side = ModelTest(model, replace(TG, n_depth=depth))
    with (
        open_model(model, ON_HOST) as opened,
        open_context(opened, side.context_options()) as context,
    ):
        measure = GenerationMeasurement(context, opened, side.test, MeasurementSize(1, 2))
        ends = []
        for _ in range(5):
            assert measure() > 0
            ends.append(context.last_position(0) + 1)
        assert ends == [depth + 3, depth + 6, depth + 3, depth + 6, depth + 3]


@pytest.mark.parametrize("depth", [0, 5])
def test_each_prompt_measurement_starts_at_the_depth(model: Path, depth: int):
    side = ModelTest(model, replace(TG, n_prompt=9, n_gen=0, n_depth=depth))
    with (
        open_model(model, ON_HOST) as opened,
        open_context(opened, side.context_options()) as context,
    ):
        measure = PromptMeasurement(context, opened, side.test, MeasurementSize(2, 1))
        for _ in range(3):
            assert measure() > 0
            assert context.last_position(0) + 1 == depth + 9


def test_settling_passes_are_not_timed(model: Path, monkeypatch: pytest.MonkeyPatch):
    """On this fake clock, every pass takes 1 ms, and the first pass after a switch 100 ms."""
    side, pass_counts = ModelTest(model, TG), []

    def timed_run(passes):
        pass_counts.append(len(passes))
        return [0] + [
            (100 if len(passes) == 1 else 1) * 1_000_000 * (at + 1) for at in range(len(passes))
        ]

    with (
        open_model(model, ON_HOST) as opened,
        open_context(opened, side.context_options()) as context,
    ):
        measure = GenerationMeasurement(context, opened, side.test, MeasurementSize(1, 2))
        monkeypatch.setattr(interleaved, "run_passes", timed_run)
        assert measure() == pytest.approx(1000)
        assert pass_counts == [1, 2]


def test_only_sides_with_equal_weights_and_threads_alternate_after_every_token(model: Path):
    side = ModelTest(model, TG)
    other_file, threads = (
        ModelTest(model.with_name("other.gguf"), TG),
        ModelTest(model, replace(TG, n_threads=2)),
    )
    assert plan_measurement(side, side, 0.005) == MeasurementSize(0, 1)
    for b in (other_file, threads):
        assert plan_measurement(side, b, 0.005) == MeasurementSize(10, 20)
        assert plan_measurement(side, b, 0.00001) == MeasurementSize(16, 32)
        assert plan_measurement(side, b, 2.0) == MeasurementSize(1, 1)
    prompt = replace(side, test=replace(TG, n_prompt=512, n_gen=0))
    assert plan_measurement(prompt, prompt, 0.01) == MeasurementSize(0, 1)
    assert plan_measurement(prompt, replace(prompt, path=other_file.path), 0.01) == MeasurementSize(
        5, 1
    )
    assert plan_measurement(prompt, replace(prompt, path=other_file.path), 2.0) == MeasurementSize(
        0, 1
    )


def test_two_models_need_more_memory_than_two_settings_of_one_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two settings of one model share its weights; two models do not."""
    side = ModelTest(model, replace(TG, n_gen=0, n_prompt=8))
    second_model = ModelTest(
        tiny_gguf.llama(tmp_path / "twin.gguf", hidden=64, ff=128, layers=2), side.test
    )
    needed_bytes = {}
    for free_bytes in range(0, 40_000_000, 50_000):
        monkeypatch.setattr(host, "available_memory", lambda free_bytes=free_bytes: free_bytes)
        for name, b in (("shared", side), ("two", second_model)):
            if name not in needed_bytes and interleaved.fit_in_memory(side, b):
                needed_bytes[name] = free_bytes
        if len(needed_bytes) == 2:
            break
    assert needed_bytes["shared"] < needed_bytes["two"]
    monkeypatch.setattr(host, "available_memory", lambda: None)
    assert interleaved.fit_in_memory(side, second_model)


def test_sides_that_do_not_fit_into_memory_are_loaded_in_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(interleaved, "fit_in_memory", lambda a, b: False)
    loaded = []

    def counting_open(path, *options):
        loaded.append(path)
        return open_model(path, *options)

    monkeypatch.setattr(interleaved, "open_model", counting_open)
    side = ModelTest(model, TG)
    (comparison,) = interleaved.compare_tests([(side, side)], QUICK, UI())
    assert len(loaded) == 2 * len(comparison.a) >= 2 * QUICK.min_pairs
    assert "do not fit into memory at the same time" in capsys.readouterr().err


def test_all_tests_share_the_error_probability_and_the_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded = []

    def counting_open(path, *options):
        loaded.append(path)
        return open_model(path, *options)

    monkeypatch.setattr(interleaved, "open_model", counting_open)
    a = [ModelTest(model, TG), ModelTest(model, replace(TG, n_prompt=8, n_gen=0))]
    b = [replace(side, test=replace(side.test, n_ubatch=16)) for side in a]
    comparisons = interleaved.compare_tests(list(zip(a, b, strict=True)), QUICK, UI())
    assert [comparison.confidence for comparison in comparisons] == [pytest.approx(0.995)] * 2
    assert len(loaded) == 1


def test_ctrl_c_ends_the_comparison(model: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(a, b, design, tick):
        signal.raise_signal(signal.SIGINT)
        while True:
            a()
            tick()

    monkeypatch.setattr(interleaved.paired_test, "compare_pairs", interrupted)
    side = ModelTest(model, TG)
    with pytest.raises(KeyboardInterrupt):
        interleaved.compare_tests([(side, side)], QUICK, UI())


def test_a_damaged_file_is_refused_before_anything_is_loaded(model: Path, tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:-1000])
    with pytest.raises(UserError):
        interleaved.compare_tests([(ModelTest(model, TG), ModelTest(broken, TG))], QUICK, UI())
