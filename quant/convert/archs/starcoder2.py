"""StarCoder 2: biases in all matrices, norms that subtract the mean, and a feed-forward of two
matrices with a GELU.

Follows StarCoder2Model of llama.cpp (conversion/starcoder.py, src/models/starcoder2.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import blocks
from quant.convert.archs.base import Arch, ArchKey, Shapes

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
    blocks.raise_problems(
        config,
        [
            *blocks.common_problems(config, activations=("gelu_pytorch_tanh",)),
            blocks.problem_head_width(config),
            (not config.get_bool("use_bias"), "it has no biases"),
        ],
    )
    return blocks.window_notes(config, "starcoder2")


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys."""
    return blocks.layer_norm_keys(config, config.get_float("norm_epsilon"))


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return (
        blocks.embedding_and_head(config)
        | blocks.norm_bias_shapes(config, "output_norm")
        | blocks.repeat_for_blocks(
            config,
            blocks.attention_shapes(config),
            blocks.qkv_bias_shapes(config),
            blocks.plain_feed_forward_shapes(config),
            blocks.output_bias_shapes(config),
            blocks.norm_bias_shapes(config, "attn_norm", "ffn_norm"),
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
