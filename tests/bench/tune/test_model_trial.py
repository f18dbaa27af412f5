"""Timing of settings on a small real model."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from llmcli.bench.tune.model_trial import ModelTrial
from llmcli.bench.tune.tune import RunSetting
from llmcli.hardware import host
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from tests.quant import tiny_gguf

SETTING = RunSetting(1, 1, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tiny_gguf.llama(
        tmp_path_factory.mktemp("tiny") / "tiny.gguf", hidden=64, ff=128, layers=2
    )
    with open_model(path, ON_HOST) as opened:
        yield opened


def contexts(trial: ModelTrial) -> list[tuple[int, str, str]]:
    return list(trial._contexts)


def test_prompts_and_answers_are_timed(model: Model) -> None:
    with ModelTrial(model, 256) as trial:
        assert min(trial.estimate_pace(SETTING)) > 0
        assert trial.time_prompt(SETTING, 256) > 0
        assert trial.time_decode(SETTING, 16) > 0
        assert trial.time_decode(replace(SETTING, cache="bf16"), 4) > 0
        assert trial.time_decode(SETTING, 16, depth=100) > 0
        context = list(trial._contexts.values())[-1].context
        assert context.last_position(0) == 115
    assert contexts(trial) == []


def test_all_options_except_threads_need_their_own_context(model: Model) -> None:
    with ModelTrial(model, 64) as trial:
        for setting in (
            SETTING,
            RunSetting(2, 1, 64),
            RunSetting(1, 2, 64),
            RunSetting(1, 1, 32, "off"),
        ):
            trial.time_prompt(setting, 64)
            trial.time_decode(setting, 2)
        assert contexts(trial) == [(64, "auto", "f16"), (32, "off", "f16")]
        (context, *_) = [warm.context for warm in trial._contexts.values()]
        assert context.n_ubatch == 64


def test_contexts_that_would_fill_the_memory_are_closed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1000)
    with ModelTrial(model, 64) as trial:
        for size in (16, 32, 64, 32):
            assert trial.time_prompt(replace(SETTING, ubatch=size), 64) > 0
            assert contexts(trial) == [(size, "auto", "f16")]
    monkeypatch.setattr(host, "available_memory", lambda: None)
    with ModelTrial(model, 64) as trial:
        for size in (16, 32, 64):
            trial.time_prompt(replace(SETTING, ubatch=size), 64)
        assert contexts(trial) == [(32, "auto", "f16"), (64, "auto", "f16")]
