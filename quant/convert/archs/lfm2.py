"""LFM2: blocks of short gated convolutions between blocks of grouped-query attention.

Follows conversion/lfm2.py and src/models/lfm2.cpp of llama.cpp. The number of key-value heads is 0
in blocks with a convolution. config.json can contain the width of the feed-forward before it is
adjusted (block_auto_adjust_ff_dim); the file has the adjusted width.
"""

from typing import Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, layout, metadata, state_space
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS: dict[str, Any] = {  # defaults of transformers' Lfm2Config
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with names that parts/ reads, with layer_types, and with the adjusted
    width of the feed-forward.
    """
    values = {**config.values, "rms_norm_eps": config.values.get("norm_eps")}
    for old, new in (
        ("tie_embedding", "tie_word_embeddings"),
        ("block_ff_dim", "intermediate_size"),
    ):
        if values.get(old) is not None:
            values[new] = values[old]
    indices = values.get("full_attn_idxs")
    if values.get("layer_types") is None and isinstance(indices, list):
        values["layer_types"] = [
            "full_attention" if layer in indices else "conv"
            for layer in range(layout.layer_count(config))
        ]
    if config.get_bool("block_auto_adjust_ff_dim"):
        width = int(2 * CheckpointConfig(values, config.location).get_int("intermediate_size") / 3)
        if values.get("block_ffn_dim_multiplier") is not None:
            multiple = config.get_int("block_multiple_of")
            width = int(config.get_float("block_ffn_dim_multiplier") * width)
            width = multiple * ((width + multiple - 1) // multiple)
        values["intermediate_size"] = width
    return CheckpointConfig(values, config.location)


def attention_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether it has attention, not a convolution."""
    return layout.layers_of_kind(config, "layer_types", ("full_attention",), ("conv",))


def problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp does not support."""
    layers = attention_layers(config)
    return [
        *checks.common_problems(config),
        checks.problem_head_width(config),
        (config.get_bool("conv_bias"), "its convolutions have biases (conv_bias)"),
        (all(layers) or not any(layers), "it does not have both convolutions and attention"),
    ]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's lfm2 computes differently. Return no notes."""
    checks.raise_problems(config, problems(config))
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, with the number of key-value heads of each layer, and the
    length of the convolutions.
    """
    kv_heads = layout.head_counts(config)[1]
    counts = [kv_heads if is_attention else 0 for is_attention in attention_layers(config)]
    change = ArchKey("attention.head_count_kv", "array:int32", counts)
    return [
        *(change if key.name == change.name else key for key in metadata.common_keys(config)),
        ArchKey("shortconv.l_cache", "uint32", config.get_int("conv_L_cache")),
    ]


def feed_forward_shapes(config: CheckpointConfig, layer: int) -> Shapes:
    """Return the shapes of one block's feed-forward, by role."""
    return block_tensors.feed_forward_shapes(config)


def required_shapes(config: CheckpointConfig, feed_forward: Any = feed_forward_shapes) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by GGUF name.
    `feed_forward` returns the shapes of the feed-forward of the block with a number.
    """
    hidden, layers = config.get_int("hidden_size"), attention_layers(config)
    attention = block_tensors.attention_shapes(config) | block_tensors.head_norm_shapes(config)
    convolution: Shapes = {
        "attn_norm.weight": (hidden,),
        "shortconv.conv.weight": (hidden, config.get_int("conv_L_cache")),
        "shortconv.in_proj.weight": (3 * hidden, hidden),
        "shortconv.out_proj.weight": (hidden, hidden),
    }
    shapes = block_tensors.embedding_and_head(config)
    shapes["token_embd_norm.weight"] = shapes.pop("output_norm.weight")  # the last norm
    return shapes | block_tensors.shapes_by_block(
        len(layers),
        lambda layer: (attention if layers[layer] else convolution) | feed_forward(config, layer),
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with convolutions [channels, 1, length] as matrices."""
    return {
        name: state_space.squeeze_kernel(tensor) if name.endswith(".conv.conv.weight") else tensor
        for name, tensor in tensors.items()
    }


LFM2 = Arch(
    name="lfm2",
    kind="LFM2",
    hf=("Lfm2ForCausalLM", "Lfm2VlForConditionalGeneration"),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
    prepare=prepare,
)
ARCHS = (LFM2,)
