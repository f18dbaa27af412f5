"""OLMo 2: norms after attention and feed-forward instead of before them, one norm over all query
heads together, and one norm over all key heads together.

Follows Olmo2Model of llama.cpp (conversion/olmo.py, src/models/olmo2.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, metadata
from quant.convert.parts.base import Arch, Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's olmo2 computes differently. Return no notes."""
    checks.raise_problems(config, problems(config))
    return []


def problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp's olmo2 computes differently
    for both OLMo 2 and OLMo 3.
    """
    return [
        *checks.common_problems(config),
        checks.problem_head_width(config),
        checks.problem_biases(config, "attention_bias"),
        (config.values.get("clip_qkv"), "its attention is clipped (clip_qkv)"),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    block = (
        block_tensors.attention_shapes(config)
        | block_tensors.joint_head_norm_shapes(config)
        | block_tensors.feed_forward_shapes(config)
        | block_tensors.post_norm_shapes(config)
    )
    del block["attn_norm.weight"], block["ffn_norm.weight"]
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(config, block)


OLMO2 = Arch(
    name="olmo2",
    kind="OLMO2",
    hf=("Olmo2ForCausalLM",),
    keys=metadata.common_keys,
    required_shapes=required_shapes,
    check=check,
    defaults={"rms_norm_eps": 1e-5},
    needs_head=True,
)

ARCHS = (OLMO2,)
