"""MiniMax M2: rotary halves in a part of each head, one norm over all query heads together, one
norm over all key heads together, and experts in every block, which a sigmoid and a bias select.

Follows MiniMaxM2Model of llama.cpp (conversion/minimax.py, src/models/minimax-m2.cpp).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, experts, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' MiniMaxM2Config
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5000000.0,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}


def rotary_width(config: CheckpointConfig) -> int:
    """Return how many values of a head are rotary: rotary_dim, or the part that
    partial_rotary_factor gives.
    """
    factor = rope.rope_settings(config).values.get("partial_rotary_factor")
    if factor is not None or config.values.get("rotary_dim") is None:
        return rope.rotary_width(config)
    return config.get_int("rotary_dim")


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's minimax-m2 computes differently. Return
    no notes.
    """
    width, values = rotary_width(config), config.values
    kinds = values.get("attn_type_list")
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, allow_partial_rotary=True),
            *experts.expert_problems(config),
            (
                width % 2 or width > layout.head_counts(config)[2],
                f"its rotary_dim is {width}",
            ),
            (
                values.get("scoring_func", "sigmoid") != "sigmoid",
                "its experts are not scored by sigmoid",
            ),
            (values.get("shared_intermediate_size"), "it has shared experts"),
            (
                kinds is not None and kinds != [1] * layout.layer_count(config),
                "some of its layers have linear attention",
            ),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, the rotary width of a head, and the keys of the experts."""
    return [
        *metadata.common_keys(config),
        ArchKey("rope.dimension_count", "uint32", rotary_width(config)),
        *experts.expert_keys(config),
        ArchKey("expert_feed_forward_length", "uint32", config.get_int("intermediate_size")),
        ArchKey("expert_gating_func", "uint32", experts.SIGMOID),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        block_tensors.joint_head_norm_shapes(config),
        experts.sparse_feed_forward_shapes(config, config.get_int("intermediate_size")),
        {"exp_probs_b.bias": (experts.expert_count(config),)},
    )


MINIMAX_M2 = Arch(
    name="minimax-m2",
    kind="MINIMAXM2",
    hf=("MiniMaxM2ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=experts.stack_experts_and_name_biases,
    needs_head=True,
)

ARCHS = (MINIMAX_M2,)
