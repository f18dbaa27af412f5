"""Turns the quantized tensors of a checkpoint into float tensors, or refuses the checkpoint if its
quantization is not supported.

config.json names the quantization. quant/checkpoint/quantized/ has one module for each supported
quantization.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.checkpoint import model_card
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.quantized import INPUTS
from quant.checkpoint.quantized.base import QuantizedInput
from quant.checkpoint.safetensors import FLOAT_DTYPES, Tensors
from quant.errors import UserError

TITLES = {
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "quip": "QuIP#",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
# Methods that quantize while a model is loaded. A float checkpoint with such settings is not
# rounded: it was fine-tuned with the method and merged into floats, and still has the settings.
LOAD_TIME_METHODS = ("bitsandbytes", "eetq", "hqq", "quanto", "torchao")
# Settings file of an older tool -> the method that uses the file. Newer tools write the settings
# into config.json.
SETTINGS_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


@dataclass(frozen=True, slots=True)
class FloatCheckpoint:
    """A checkpoint whose tensors are all floats, or ggml's own blocks. `method` is the quantization
    in which the checkpoint was stored, "" if it was stored in floats. `notes` are remarks for the
    user.
    """

    tensors: Tensors
    method: str
    notes: tuple[str, ...]


def restore_floats(
    folder: CheckpointFolder, config: CheckpointConfig, tensors: Tensors
) -> FloatCheckpoint:
    """Return the checkpoint with its quantized tensors as floats. The floats of a tensor are
    computed when its rows are read.

    Raises UserError for a quantization that is not supported.
    """
    settings = _settings(config) or _sidecar_settings(folder, tensors)
    if settings is None or (
        settings.get("quant_method") in LOAD_TIME_METHODS and _all_floats(tensors)
    ):
        return FloatCheckpoint(tensors, "", ())
    input_format = _input_format(folder.path, config, settings)
    result = input_format.restore(
        CheckpointConfig(settings, f"{config.location}: quantization_config"), tensors
    )
    changed = [tensor for name, tensor in result.items() if tensors.get(name) is not tensor]
    if not changed:
        # all weights are floats, and the settings belong to another model
        return FloatCheckpoint(result, "", ())
    if all(tensor.dtype not in FLOAT_DTYPES for tensor in changed):  # ggml's own blocks
        return FloatCheckpoint(result, input_format.name, ())
    parent = model_card.find_parent(folder.path, config.values)
    note = (
        f"this checkpoint is already quantized ({input_format.title}): its weights are widened to "
        "floats, and quantizing them again adds to their error; "
        f"{parent or 'the model it was made from'} gives a better file"
    )
    return FloatCheckpoint(result, input_format.name, (note,))


def _settings(config: CheckpointConfig) -> Mapping[str, Any] | None:
    """Return the quantization settings in config.json, or None if there are none."""
    for key in ("quantization_config", "compression_config"):
        if value := config.values.get(key):
            return value if isinstance(value, dict) else {"quant_method": value}
    return None


def _all_floats(tensors: Tensors) -> bool:
    return all(tensor.dtype in FLOAT_DTYPES for tensor in tensors.values())


def _sidecar_settings(folder: CheckpointFolder, tensors: Tensors) -> Mapping[str, Any] | None:
    """Return the quantization settings in a separate file of the folder, as older tools write it.
    Return None if there is no such file, or if all weights are floats.
    """
    if _all_floats(tensors):
        return None
    for name, method in SETTINGS_FILES.items():
        if folder.has_file(name):
            values = folder.read_json(name)
            settings = values.get("quantization")
            return {"quant_method": method, **(settings if isinstance(settings, dict) else values)}
    return None


def _input_format(
    folder: Path, config: CheckpointConfig, settings: Mapping[str, Any]
) -> QuantizedInput:
    """Return the checkpoint format that the quantization settings name. Raises UserError if it is
    not supported.
    """
    method = settings.get("quant_method", "unknown")
    if isinstance(method, str) and method in INPUTS:
        return INPUTS[method]
    title = TITLES.get(method, method) if isinstance(method, str) else "unknown"
    titles = ", ".join(dict.fromkeys(input_format.title for input_format in INPUTS.values()))
    parent = model_card.find_parent(folder, config.values)
    raise UserError(
        f"{folder} is quantized ({title}), which is not supported; supported are {titles}",
        hint=f"use the model it was made from: {parent}"
        if parent
        else "use the model it was made from",
    )
