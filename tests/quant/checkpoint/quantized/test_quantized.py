"""The contract of every quantized checkpoint format: float tensors are unchanged."""

from pathlib import Path

import pytest

from quant.checkpoint import safetensors
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.quantized import INPUTS

# Settings without which a format is refused.
SETTINGS = {
    "gptq": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
}


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_tensors_of_floats_stay(name: str, stories: Path) -> None:
    found = safetensors.load_tensors(CheckpointFolder(stories))
    known = INPUTS[name]
    assert known.name == name
    assert known.title
    settings = CheckpointConfig({"quant_method": name, **SETTINGS.get(name, {})}, "config.json")
    assert known.restore(settings, found) == found
