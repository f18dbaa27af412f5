"""Quantized variants of the stories260K checkpoint, written with safetensors and read as floats."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from quant.checkpoint import dequantize, language_part, safetensors, tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder


def write(stories: Path, folder: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> Path:
    """Copy the checkpoint `stories` to `folder` with other tensors, and return `folder`.

    `tensors` are the torch tensors by name. `settings` become the `quantization_config` of the
    config.json.
    """
    from safetensors.torch import save_file

    shutil.copytree(stories, folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def restored_tensors(folder: Path, rows_per_read: int = 7) -> dict[str, np.ndarray]:
    """Return the tensors of a quantized checkpoint as floats, by name, read in spans of rows."""
    config = CheckpointConfig(
        json.loads((folder / "config.json").read_text()), str(folder / "config.json")
    )
    tensors = dequantize.restore_floats(
        CheckpointFolder(folder),
        config,
        language_part.extract_language_part(
            folder, safetensors.load_tensors(CheckpointFolder(folder))
        ).tensors,
    ).tensors
    values = {}
    for name, tensor in tensors.items():
        row_spans = [
            tensor_views.read_floats(
                tensor, first, min(first + rows_per_read, tensor_views.row_count(tensor))
            )
            for first in range(0, tensor_views.row_count(tensor), rows_per_read)
        ]
        values[name] = np.concatenate(row_spans).reshape(tensor.shape)
    return values
