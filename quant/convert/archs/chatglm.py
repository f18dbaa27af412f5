"""GLM-4 (9B chat in the format of transformers) and GLM-Edge: rotary pairs in a part of each head,
and gate and up in one matrix.

Follows conversion/chatglm.py and src/models/chatglm.cpp of llama.cpp, whose converter writes a
rotary base of 10000, an eps of 1e-5 and a context of hidden_size tokens for these checkpoints; here
they are those of config.json.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import glm4
from quant.convert.parts import block_tensors, checks
from quant.convert.parts.base import Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's chatglm computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, allow_partial_rotary=True),
            checks.problem_head_width(config),
        ],
    )
    return []


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    biases = block_tensors.qkv_bias_shapes(config) if config.get_bool("attention_bias") else {}
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        biases,
        block_tensors.fused_feed_forward_shapes(config),
    )


CHATGLM = replace(
    glm4.GLM4,
    name="chatglm",
    kind="CHATGLM",
    hf=("GlmForCausalLM",),
    required_shapes=required_shapes,
    check=check,
)

ARCHS = (CHATGLM,)
