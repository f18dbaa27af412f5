"""Quantized checkpoints for tests: the stories with other tensors, written by safetensors, and read
back as floats.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from quant.checkpoint import dequantize, language_part, safetensors, tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder


def write(stories: Path, folder: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> Path:
    """A copy of the stories' folder with these torch tensors and this quantization_config."""
    from safetensors.torch import save_file

    shutil.copytree(stories, folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def opened(folder: Path, slab: int = 7) -> dict[str, np.ndarray]:
    """The checkpoint's tensors in floats under their own names, read a few rows at a time."""
    config = CheckpointConfig(
        json.loads((folder / "config.json").read_text()), str(folder / "config.json")
    )
    found = dequantize.restore_floats(
        CheckpointFolder(folder),
        config,
        language_part.extract_language_part(
            folder, safetensors.load_tensors(CheckpointFolder(folder))
        ).tensors,
    ).tensors
    values = {}
    for name, tensor in found.items():
        pieces = [
            tensor_views.read_floats(
                tensor, first, min(first + slab, tensor_views.row_count(tensor))
            )
            for first in range(0, tensor_views.row_count(tensor), slab)
        ]
        values[name] = np.concatenate(pieces).reshape(tensor.shape)
    return values
