"""GPT-2: learned positions, queries, keys and values in one matrix, biases in all matrices, and
norms that subtract the mean. Checkpoints store the matrices transposed.

Follows GPT2Model of llama.cpp (conversion/gpt2.py, src/models/gpt2.cpp).
"""

from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}  # of transformers' GPT2Config
USUAL_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
}
TRANSPOSED_ENDINGS = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the names that other families use."""
    values = dict(config.values)
    for name, usual in USUAL_NAMES.items():
        if values.get(name) is not None:
            values[usual] = values[name]
    if values.get("n_inner") is None and isinstance(values.get("hidden_size"), int):
        values["intermediate_size"] = 4 * values["hidden_size"]
    return replace(config, values=values)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's gpt2 computes differently. Return no notes."""
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config,
                rope_types=("default",),
                activations=("gelu_new", "gelu_pytorch_tanh"),
                activation_key="activation_function",
            ),
            checks.problem_head_width(config),
            checks.problem_shared_keys(config),
            (
                config.get_bool("scale_attn_by_inverse_layer_idx"),
                "its attention is scaled by layer (scale_attn_by_inverse_layer_idx)",
            ),
            (
                not config.get_bool("scale_attn_weights", default=True),
                "its attention is not scaled (scale_attn_weights)",
            ),
            (config.get_bool("add_cross_attention"), "it attends to another model"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys without the rotary base."""
    entries = metadata.layer_norm_keys(config, config.get_float("layer_norm_epsilon"))
    return [key for key in entries if not key.name.startswith("rope.")]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden = config.get_int("hidden_size")
    block = (
        block_tensors.fused_attention_shapes(config)
        | block_tensors.plain_feed_forward_shapes(config)
        | {"attn_qkv.bias": (3 * hidden,)}
        | block_tensors.output_bias_shapes(config)
        | block_tensors.norm_bias_shapes(config, "attn_norm", "ffn_norm")
    )
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.norm_bias_shapes(config, "output_norm")
        | {"position_embd.weight": (config.get_int("max_position_embeddings"), hidden)}
        | block_tensors.repeat_for_blocks(config, block)
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with the matrices of the blocks transposed."""
    return {
        name: tensor_views.transpose(tensor)
        if name.endswith(TRANSPOSED_ENDINGS) and len(tensor.shape) == 2
        else tensor
        for name, tensor in tensors.items()
    }


GPT2 = Arch(
    name="gpt2",
    kind="GPT2",
    hf=("GPT2LMHeadModel",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
    prepare=prepare,
    dropped_endings=(".attn.bias", ".attn.masked_bias"),
)

ARCHS = (GPT2,)
