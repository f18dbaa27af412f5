"""DeepSeek V3.2: DeepSeek V3 with an indexer in each layer, which selects the positions to which a
token attends. The indexer has rotary halves, the attention interleaved pairs.

Follows DeepseekV32Model of llama.cpp (conversion/deepseek.py, src/models/deepseek32.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import deepseek2, glm_dsa
from quant.convert.parts import block_tensors, checks
from quant.convert.parts.base import ArchKey, Shapes

DEFAULTS = glm_dsa.DEFAULTS | {  # defaults of transformers' DeepseekV32Config
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "n_group": 8,
    "topk_group": 4,
    "index_n_heads": 64,
}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's deepseek32 computes differently; return notes
    for the user.
    """
    checks.raise_problems(config, glm_dsa.indexer_problems(config))
    return deepseek2.check_v3(config)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return DeepSeek V3's metadata keys, then those of the indexer."""
    return [*deepseek2.V3.keys(config), *glm_dsa.indexer_keys(config)]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return deepseek2.V3.required_shapes(config) | block_tensors.repeat_for_blocks(
        config, glm_dsa.indexer_shapes(config)
    )


DEEPSEEK32 = replace(
    glm_dsa.GLM_DSA,
    name="deepseek32",
    kind="DEEPSEEK32",
    hf=("DeepseekV32ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
)

ARCHS = (DEEPSEEK32,)
