"""A quantized checkpoint as the floats it stands for, or the word that it cannot be had.

Finds the format that config.json names among quant/inputs; what is not there is refused by its
name, with the model it was made from where the checkpoint tells. It knows no format and no family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant import card
from quant.archs.base import Config, Tensors
from quant.errors import Refusal
from quant.inputs import INPUTS
from quant.inputs.base import Input
from quant.tensors import FLOATS, read_json

TITLES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "quip": "QuIP#",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
# These round a model's floats when they load it: where the floats are here, nothing is rounded yet.
# Finetunes made on top of such a model and merged into its floats keep the settings.
LATE = ("bitsandbytes", "eetq", "hqq", "quanto", "torchao")
# Where older tools wrote what config.json says today, and whose settings they are.
BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint in floats; `method` is "" where it was in floats all along."""

    tensors: Tensors
    method: str
    notes: tuple[str, ...]


def restore(folder: Path, config: Config, tensors: Tensors) -> Restored:
    """The tensors with everything quantized computed when it is read; refuses an unknown format by
    name.
    """
    settings = _settings(config) or _beside(folder, tensors)
    if settings is None or (settings.get("quant_method") in LATE and _floats(tensors)):
        return Restored(tensors, "", ())
    kind = _input(folder, config, settings)
    found = kind.restore(Config(settings, f"{config.where}: quantization_config"), tensors)
    if all(tensors.get(name) is tensor for name, tensor in found.items()):
        return Restored(
            found, "", ()
        )  # settings left over from a model whose weights are floats here
    if kind.native:
        return Restored(found, kind.name, ())
    parent = card.parent(folder, config.values)
    note = (
        f"this checkpoint is quantized already ({kind.title}): its weights are widened to floats, and rounding "
        f"them again adds that error to the error they have; {parent or 'the model it was made from'} gives a "
        "better file"
    )
    return Restored(found, kind.name, (note,))


def _settings(config: Config) -> Mapping[str, Any] | None:
    for key in ("quantization_config", "compression_config"):
        if value := config.values.get(key):
            return value if isinstance(value, dict) else {"quant_method": value}
    return None


def _floats(tensors: Tensors) -> bool:
    return all(tensor.dtype in FLOATS for tensor in tensors.values())


def _beside(folder: Path, tensors: Tensors) -> Mapping[str, Any] | None:
    """The settings in a file of their own; none where all weights are floats, whatever was left
    beside them.
    """
    if _floats(tensors):
        return None
    for name, method in BESIDE.items():
        if (folder / name).is_file():
            values = read_json(folder / name)
            inner = values.get("quantization")
            return {"quant_method": method, **(inner if isinstance(inner, dict) else values)}
    return None


def _input(folder: Path, config: Config, settings: Mapping[str, Any]) -> Input:
    method = settings.get("quant_method", "unknown")
    if isinstance(method, str) and method in INPUTS:
        return INPUTS[method]
    title = TITLES.get(method, method) if isinstance(method, str) else "unknown"
    known = ", ".join(dict.fromkeys(kind.title for kind in INPUTS.values()))
    parent = card.parent(folder, config.values)
    raise Refusal(
        f"{folder} is quantized already ({title}), which is not undone here; {known} are",
        hint=f"use the model it was made from: {parent}"
        if parent
        else "use the model it was made from",
    )
