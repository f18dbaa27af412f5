"""Llama and Mistral: grouped-query attention, rotary heads stored in two halves, a feed-forward
gated by SiLU, and RMS norms.

Follows conversion/llama.py of llama.cpp. Rotary settings are read from rope_theta and rope_scaling,
or from rope_parameters.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's llama computes differently; return notes for
    the user.
    """
    experts = (config.values.get("num_local_experts"), "it is a mixture of experts")
    checks.raise_problems(
        config,
        [*checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS), experts],
    )
    return checks.window_notes(config, "llama")


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys and the rotary width of a head, which is the whole head."""
    return [
        *metadata.common_keys(config),
        ArchKey("rope.dimension_count", "uint32", layout.head_counts(config)[2]),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, block_tensors.attention_shapes(config), block_tensors.feed_forward_shapes(config)
    )


def optional_biases(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the biases that some fine-tuned models have. llama.cpp loads them if
    they are in the file.
    """
    return block_tensors.repeat_for_blocks(
        config,
        block_tensors.qkv_bias_shapes(config),
        block_tensors.output_bias_shapes(config),
        {"ffn_gate.bias": (config.get_int("intermediate_size"),)},
    )


LLAMA = Arch(
    name="llama",
    kind="LLAMA",
    hf=("LlamaForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    optional_shapes=optional_biases,
    check=check,
    ops=rope.INTERLEAVE_OPS,
    extra_tensors=rope.llama3_rope_factors,
)

MISTRAL = replace(
    LLAMA, hf=("MistralForCausalLM",), defaults={"sliding_window": 4096, "num_key_value_heads": 8}
)

ARCHS = (LLAMA, MISTRAL)
