"""Parameters of Apertus' activation: they are read from tensors, and faulty ones are refused."""

import numpy as np
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import apertus
from quant.errors import UserError
from tests.quant.checkpoint.test_tensor_views import lazy

CONFIG = CheckpointConfig({"num_hidden_layers": 2}, "config.json")


def parameters(*names: str, size: int = 1) -> Tensors:
    """Return a tensor of `size` numbers for each parameter in `names` and each of two layers."""
    tensors: Tensors = {}
    for layer in range(2):
        for number, name in enumerate(names):
            full = f"model.layers.{layer}.mlp.act_fn.{name}"
            tensors[full] = lazy(np.full(size, number + layer / 2, np.float32), full)
    return tensors


def test_parameters_are_read_for_each_layer_or_have_the_defaults_of_transformers() -> None:
    keys = apertus.tensor_keys(CONFIG, parameters("alpha_n", "alpha_p", "eps"))
    assert {key.name: key.value for key in keys} == {
        "xielu.alpha_n": [0.0, 0.5],
        "xielu.alpha_p": [1.0, 1.5],
        "xielu.beta": [0.5, 0.5],
        "xielu.eps": [2.0, 2.5],
    }


@pytest.mark.parametrize("tensors", [{}, parameters("alpha_n"), parameters("alpha_n", size=2)])
def test_missing_or_longer_parameter_is_refused(tensors: Tensors) -> None:
    with pytest.raises(UserError, match=r"act_fn\.alpha_[np] is missing or not one number"):
        apertus.tensor_keys(CONFIG, tensors)
