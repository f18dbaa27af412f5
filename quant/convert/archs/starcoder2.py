"""StarCoder 2: biases in all matrices, norms that subtract the mean, and a feed-forward of two
matrices with a GELU.

Follows StarCoder2Model of llama.cpp (conversion/starcoder.py, src/models/starcoder2.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' Starcoder2Config
    "num_key_value_heads": 2,
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's starcoder2 computes differently; return notes
    for the user.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, activations=("gelu_pytorch_tanh",)),
            checks.problem_head_width(config),
            (not config.get_bool("use_bias"), "it has no biases"),
        ],
    )
    return checks.window_notes(config, "starcoder2")


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys."""
    return metadata.layer_norm_keys(config, config.get_float("norm_epsilon"))


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.norm_bias_shapes(config, "output_norm")
        | block_tensors.repeat_for_blocks(
            config,
            block_tensors.attention_shapes(config),
            block_tensors.qkv_bias_shapes(config),
            block_tensors.plain_feed_forward_shapes(config),
            block_tensors.output_bias_shapes(config),
            block_tensors.norm_bias_shapes(config, "attn_norm", "ffn_norm"),
        )
    )


STARCODER2 = Arch(
    name="starcoder2",
    kind="STARCODER2",
    hf=("Starcoder2ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
)

ARCHS = (STARCODER2,)
