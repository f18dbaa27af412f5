"""Two interleaved sides on real models: what is measured, at which depth, and what is not counted."""

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
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
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
def test_a_generation_goes_on_and_begins_anew_behind_its_depth(model: Path, depth: int):
    side = ModelTest(model, replace(TG, n_depth=depth))
    with (
        open_model(model, gpu_layers=0) as opened,
        open_context(opened, side.context_options()) as context,
    ):
        measure = GenerationMeasurement(context, opened, side.test, MeasurementSize(1, 2))
        ends = []
        for _ in range(5):
            assert measure() > 0
            ends.append(context.last_position(0) + 1)
        assert ends == [depth + 3, depth + 6, depth + 3, depth + 6, depth + 3]


@pytest.mark.parametrize("depth", [0, 5])
def test_a_prompt_is_read_behind_its_depth_every_time(model: Path, depth: int):
    side = ModelTest(model, replace(TG, n_prompt=9, n_gen=0, n_depth=depth))
    with (
        open_model(model, gpu_layers=0) as opened,
        open_context(opened, side.context_options()) as context,
    ):
        measure = PromptMeasurement(context, opened, side.test, MeasurementSize(2, 1))
        for _ in range(3):
            assert measure() > 0
            assert context.last_position(0) + 1 == depth + 9


def test_what_settles_is_not_timed(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Every pass takes 1 ms on this clock, the first after a switch 100."""
    side, asked = ModelTest(model, TG), []

    def counted(passes):
        asked.append(len(passes))
        return [0] + [
            (100 if len(passes) == 1 else 1) * 1_000_000 * (at + 1) for at in range(len(passes))
        ]

    with (
        open_model(model, gpu_layers=0) as opened,
        open_context(opened, side.context_options()) as context,
    ):
        measure = GenerationMeasurement(context, opened, side.test, MeasurementSize(1, 2))
        monkeypatch.setattr(interleaved, "run_passes", counted)
        assert measure() == pytest.approx(1000)
        assert asked == [1, 2]


def test_alike_sides_change_after_every_token_and_others_settle(model: Path):
    side = ModelTest(model, TG)
    other, threads = (
        ModelTest(model.with_name("other.gguf"), TG),
        ModelTest(model, replace(TG, n_threads=2)),
    )
    assert plan_measurement(side, side, 0.005) == MeasurementSize(0, 1)
    for b in (other, threads):
        assert plan_measurement(side, b, 0.005) == MeasurementSize(10, 20)
        assert plan_measurement(side, b, 0.00001) == MeasurementSize(16, 32)
        assert plan_measurement(side, b, 2.0) == MeasurementSize(1, 1)
    prompt = replace(side, test=replace(TG, n_prompt=512, n_gen=0))
    assert plan_measurement(prompt, prompt, 0.01) == MeasurementSize(0, 1)
    assert plan_measurement(prompt, replace(prompt, path=other.path), 0.01) == MeasurementSize(5, 1)
    assert plan_measurement(prompt, replace(prompt, path=other.path), 2.0) == MeasurementSize(0, 1)


def test_the_room_for_one_may_not_be_enough_for_two(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Settings of one model share its weights; two models do not."""
    side = ModelTest(model, replace(TG, n_gen=0, n_prompt=8))
    twin = ModelTest(
        tiny_gguf.llama(tmp_path / "twin.gguf", hidden=64, ff=128, layers=2), side.test
    )
    found = {}
    for room in range(0, 40_000_000, 50_000):
        monkeypatch.setattr(host, "available_memory", lambda room=room: room)
        for name, b in (("shared", side), ("two", twin)):
            if name not in found and interleaved.fit_in_memory(side, b):
                found[name] = room
        if len(found) == 2:
            break
    assert found["shared"] < found["two"]
    monkeypatch.setattr(host, "available_memory", lambda: None)
    assert interleaved.fit_in_memory(side, twin)


def test_two_that_do_not_fit_are_loaded_in_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(interleaved, "fit_in_memory", lambda a, b: False)
    loaded = []

    def counted(path, **how):
        loaded.append(path)
        return open_model(path, **how)

    monkeypatch.setattr(interleaved, "open_model", counted)
    side = ModelTest(model, TG)
    (found,) = interleaved.compare_tests([(side, side)], QUICK, UI())
    assert len(loaded) == 2 * len(found.a) >= 2 * QUICK.min_pairs
    assert "do not fit into memory at the same time" in capsys.readouterr().err


def test_all_tests_share_the_doubt_and_the_weights(model: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = []

    def counted(path, **how):
        loaded.append(path)
        return open_model(path, **how)

    monkeypatch.setattr(interleaved, "open_model", counted)
    a = [ModelTest(model, TG), ModelTest(model, replace(TG, n_prompt=8, n_gen=0))]
    b = [replace(side, test=replace(side.test, n_ubatch=16)) for side in a]
    found = interleaved.compare_tests(list(zip(a, b, strict=True)), QUICK, UI())
    assert [one.confidence for one in found] == [pytest.approx(0.995)] * 2
    assert len(loaded) == 1


def test_ctrl_c_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch):
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
