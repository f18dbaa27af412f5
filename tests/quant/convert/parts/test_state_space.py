"""Tensors of state-space layers get the form that llama.cpp loads, and wrong shapes stay as they
are, so that the converter can name them.
"""

import math
from typing import Any

import numpy as np
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import state_space
from quant.convert.parts.state_space import Mamba2Widths
from tests.quant.checkpoint.test_tensor_views import lazy, values

MIXER = "model.layers.3.mamba."
RANDOM = np.random.default_rng(11)


def draw(*shape: int) -> np.ndarray:
    """Return random values of this shape."""
    return RANDOM.normal(size=shape).astype(np.float32)


def test_tensors_of_a_mixer_are_prepared() -> None:
    stored = {
        "A_log": draw(4),
        "D": draw(4),
        "dt_bias": draw(4),
        "conv1d.weight": draw(10, 1, 3),
        "norm.weight": draw(6),
        "in_proj.weight": draw(2, 5),
    }
    prepared = state_space.prepare_mixers(
        2, {MIXER + name: lazy(data) for name, data in stored.items()}
    )
    results = {name.removeprefix(MIXER): values(tensor) for name, tensor in prepared.items()}
    np.testing.assert_array_equal(
        results["A_log"][:, 0], [-np.exp(value) for value in stored["A_log"]]
    )
    np.testing.assert_array_equal(results["D"][:, 0], stored["D"])
    np.testing.assert_array_equal(results["dt_proj.bias"], stored["dt_bias"])
    np.testing.assert_array_equal(results["conv1d.weight"], stored["conv1d.weight"][:, 0])
    np.testing.assert_array_equal(results["norm.weight"], stored["norm.weight"].reshape(2, 3))
    np.testing.assert_array_equal(results["in_proj.weight"], stored["in_proj.weight"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("A_log", (4, 2)),
        ("D", (2, 2)),
        ("conv1d.weight", (10, 3)),
        ("conv1d.weight", (10, 2, 3)),
        ("norm.weight", (7,)),
        ("norm.weight", (2, 3)),
    ],
)
def test_tensor_of_another_shape_stays(name: str, shape: tuple[int, ...]) -> None:
    prepared = state_space.prepare_mixers(2, {MIXER + name: lazy(draw(*shape))})
    assert prepared[MIXER + name].shape == shape


def test_other_norms_stay() -> None:
    tensors = {"model.layers.3.norm.weight": lazy(draw(6))}
    assert state_space.prepare_mixers(2, tensors) == tensors


@pytest.mark.parametrize(
    ("limit", "is_refused"),
    [
        (None, False),
        ([0.0, math.inf], False),
        ([0.0, {"__float__": "Infinity"}], False),
        ([0.001, math.inf], True),
        ([0.0, 0.1], True),
        ("x", True),
        (3, True),
    ],
)
def test_limited_time_steps_are_refused(limit: Any, is_refused: bool) -> None:
    config = CheckpointConfig({"time_step_limit": limit}, "config.json")
    assert bool(state_space.problem_step_limit(config)[0]) is is_refused


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, 0),
        ({"heads": 3, "groups": 1}, 1),
        ({"groups": 3}, 1),
        ({"kernel": 1}, 1),
        ({"heads": 6, "groups": 4, "inner": 24}, 1),
    ],
)
def test_widths_that_do_not_divide_are_refused(changes: dict[str, int], problems: int) -> None:
    widths = Mamba2Widths(
        **{"inner": 32, "state": 8, "groups": 2, "heads": 4, "kernel": 4} | changes
    )
    assert sum(bool(problem) for problem, _ in state_space.width_problems(widths)) == problems
