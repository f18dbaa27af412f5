"""Prediction layers: the layers after the last normal layer, which predict further tokens (MTP,
NextN). They are the last blocks of the converted file, and llama.cpp uses them only to draft.

A family has them if its Arch has `prediction_shapes`. The converter counts the layers that the
checkpoint has, and writes the count to the config, from which layer_count() reads it. Follows
_QwenMtpMixin of llama.cpp (conversion/qwen.py), and conversion/deepseek.py.
"""

import re
from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts.base import ArchKey, Shapes

COUNT_SETTING = "llmcli_prediction_layers"
# Maximum number of prediction layers. Released checkpoints have at most three.
MAX_COUNT = 16
LAYER_NAME = re.compile(r"(?:model\.)?layers\.(\d{1,4})\.(.+)")
MTP_NAME = re.compile(r"(?:model\.)?mtp\.(?:layers\.(\d{1,4})\.)?(.+)")
# Names in "mtp." of tensors that the first prediction layer has -> names in a layer
MTP_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def layer_count(config: CheckpointConfig) -> int:
    """Return the number of prediction layers that are converted, which the converter wrote to the
    config.
    """
    count = config.values.get(COUNT_SETTING)
    return count if type(count) is int and 0 <= count <= MAX_COUNT else 0


def with_layer_count(config: CheckpointConfig, count: int) -> CheckpointConfig:
    """Return the config with the number of prediction layers that are converted."""
    return replace(config, values={**config.values, COUNT_SETTING: count})


def layer_name(config: CheckpointConfig, name: str) -> str:
    """Return the name of a tensor of "mtp." as one of a layer: `mtp.layers.0.*` is
    `model.layers.N.*`, where N is the number of normal layers. Return any other name unchanged.
    """
    normal_count = config.get_int("num_hidden_layers")
    match = MTP_NAME.fullmatch(name)
    if match is None:
        return name
    if match[1] is not None:
        return f"model.layers.{normal_count + int(match[1])}.{match[2]}"
    stem, _, ending = match[2].rpartition(".")
    return f"model.layers.{normal_count}.{MTP_NAMES[stem]}.{ending}" if stem in MTP_NAMES else name


def split_layers(tensors: Tensors, normal_count: int) -> tuple[Tensors, Tensors]:
    """Return the tensors without those of prediction layers, and those of prediction layers, which
    have names as layer_name() returns them.

    A prediction layer has a tensor eh_proj. All tensors of other layers are in the first part.
    """
    numbers = {
        number
        for number in range(normal_count, normal_count + MAX_COUNT)
        if f"model.layers.{number}.eh_proj.weight" in tensors
    }
    predicting = {
        name: tensor
        for name, tensor in tensors.items()
        if (match := LAYER_NAME.fullmatch(name)) and int(match[1]) in numbers
    }
    return {name: item for name, item in tensors.items() if name not in predicting}, predicting


def count_layers(predicting: Tensors, normal_count: int) -> int:
    """Return the number of layers from the first prediction layer to the last that has a tensor."""
    numbers = [int(match[1]) for name in predicting if (match := LAYER_NAME.fullmatch(name))]
    return max(numbers, default=normal_count - 1) + 1 - normal_count


def extend_keys(keys: list[ArchKey], count: int) -> list[ArchKey]:
    """Return the metadata keys of a model with `count` prediction layers, given those without. The
    prediction layers are blocks.
    """
    if not count:
        return keys
    return [
        *(
            replace(key, value=key.value + count)
            if key.name == "block_count" and isinstance(key.value, int)
            else key
            for key in keys
        ),
        ArchKey("nextn_predict_layers", "uint32", count),
    ]


def input_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors that a prediction layer has before its block, by role: the
    norms of the embedding and of the hidden state, and the projection of both.
    """
    hidden = config.get_int("hidden_size")
    return {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
    }


def optional_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors that a prediction layer may have, by role. Without them,
    llama.cpp uses those of the model.
    """
    hidden, vocab = config.get_int("hidden_size"), config.get_int("vocab_size")
    return {
        "nextn.embed_tokens.weight": (vocab, hidden),
        "nextn.shared_head_head.weight": (vocab, hidden),
        "nextn.shared_head_norm.weight": (hidden,),
    }


def repeat_shapes(config: CheckpointConfig, shapes: Shapes, normal_count: int) -> Shapes:
    """Return the shapes of all prediction layers by GGUF name, given those of one by role."""
    return {
        f"blk.{normal_count + layer}.{role}": shape
        for layer in range(layer_count(config))
        for role, shape in shapes.items()
    }
