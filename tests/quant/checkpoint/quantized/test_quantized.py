"""Every quantized checkpoint format leaves tensors that are stored as floats unchanged."""

from pathlib import Path

import pytest

from quant.checkpoint import safetensors
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.quantized import INPUTS

# Settings that a format requires, by the name of the format.
SETTINGS = {
    "gptq": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
}


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_float_tensors_are_unchanged(name: str, stories: Path) -> None:
    tensors = safetensors.load_tensors(CheckpointFolder(stories))
    checkpoint_format = INPUTS[name]
    assert checkpoint_format.name == name
    assert checkpoint_format.title
    settings = CheckpointConfig({"quant_method": name, **SETTINGS.get(name, {})}, "config.json")
    assert checkpoint_format.restore(settings, tensors) == tensors
