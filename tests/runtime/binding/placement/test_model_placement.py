"""Tests of the placement of a model's weights as llama.cpp gets it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmcli.runtime.binding import model as model_module
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import EVERYWHERE, ON_HOST, ModelPlacement


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[float] | None, bool]]:
    """Record the number of layers, the split and the repacking of each load."""
    recorded: list[tuple[int, list[float] | None, bool]] = []
    library, load = lib(), lib().llama_model_load_from_file

    def record(path: bytes, params: Any) -> Any:
        split = params.tensor_split[:3] if params.tensor_split else None
        recorded.append((params.n_gpu_layers, split, params.use_extra_bufts))
        return load(path, params)

    monkeypatch.setattr(library, "llama_model_load_from_file", record)
    monkeypatch.setattr(model_module, "lib", lambda: library)
    return recorded


def test_a_placement_applies_to_its_own_model_only(
    stories_gguf: Path, loads: list[tuple[int, list[float] | None, bool]]
) -> None:
    placements = ModelPlacement(3, (2.0, 1.0), repack=False), ON_HOST, EVERYWHERE
    for placement in placements:
        with open_model(stories_gguf, placement):
            pass
    assert [(layers, split) for layers, split, _ in loads] == [
        (3, [2.0, 1.0, 0.0]),
        (0, None),
        (-1, None),
    ]
    assert not loads[0][2]


def test_a_draft_model_is_on_the_devices_of_its_model() -> None:
    split = (3.0, 1.0)
    assert ModelPlacement(5, split).for_draft() == ModelPlacement(-1, split)
    assert ModelPlacement(0, split).for_draft() == replace(ON_HOST, tensor_split=split)
