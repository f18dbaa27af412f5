"""Experts behind a router with groups of experts, in the layers after the dense ones, as in DeepSeek.

Follows DeepseekV2Model of llama.cpp (conversion/deepseek.py).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, experts, layout
from quant.convert.parts.base import ArchKey, Shapes


def dense_layer_count(config: CheckpointConfig) -> int:
    """Return the number of layers without experts. These are the first layers."""
    first = (
        config.get_int("first_k_dense_replace") if config.values.get("first_k_dense_replace") else 0
    )
    return min(first, layout.layer_count(config))


def expert_groups(config: CheckpointConfig) -> tuple[int, int]:
    """Return the number of groups into which the experts are divided, and the number of groups
    whose experts a token may use. Return (1, 1) if a token may use all groups.
    """
    count, used = config.get_int("n_group", default=1), config.get_int("topk_group", default=1)
    return (
        (1, 1) if config.values.get("topk_method") == "greedy" or used >= count else (count, used)
    )


def router_problems(config: CheckpointConfig, scoring: str) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of the experts and of their router in families whose
    router has groups of experts. `scoring` is the scoring_func that the family must have.
    """
    (group_count, used_groups), values = expert_groups(config), config.values
    count = experts.expert_count(config)
    return [
        *experts.expert_problems(config),
        (
            values.get("moe_layer_freq") not in (None, 1),
            f"its moe_layer_freq is {values.get('moe_layer_freq')}",
        ),
        (
            values.get("scoring_func", scoring) != scoring,
            f"its scoring_func is {values.get('scoring_func')}",
        ),
        (count < 2, "it has only one expert"),
        (
            count % group_count or group_count >= count,
            f"{count} experts cannot be split into {group_count} groups",
        ),
        (
            experts.used_expert_count(config) > count // group_count * used_groups,
            f"it uses more experts than {used_groups} groups have",
        ),
    ]


def router_keys(config: CheckpointConfig, gating: int) -> list[ArchKey]:
    """Return the metadata keys of dense layers, of experts and of their router. `gating` is
    llama.cpp's number of the function that scores the experts.
    """
    group_count, used_groups = expert_groups(config)
    return [
        ArchKey("leading_dense_block_count", "uint32", dense_layer_count(config)),
        *experts.expert_keys(config),
        ArchKey("expert_feed_forward_length", "uint32", config.get_int("moe_intermediate_size")),
        ArchKey("expert_shared_count", "uint32", config.get_int("n_shared_experts")),
        ArchKey("expert_weights_scale", "float32", config.get_float("routed_scaling_factor")),
        ArchKey("expert_weights_norm", "bool", config.get_bool("norm_topk_prob")),
        ArchKey("expert_gating_func", "uint32", gating),
        ArchKey("expert_group_count", "uint32", group_count),
        ArchKey("expert_group_used_count", "uint32", used_groups),
    ]


def feed_forward_shapes(config: CheckpointConfig, has_expert_bias: bool) -> Shapes:
    """Return the shapes of the feed-forward of all blocks, of which the first are dense, and of the
    norms before it, by GGUF name. With `has_expert_bias`, each router has a bias.
    """
    dense, first = block_tensors.feed_forward_shapes(config), dense_layer_count(config)
    sparse = expert_feed_forward_shapes(config, has_expert_bias)
    return block_tensors.shapes_by_block(
        layout.layer_count(config), lambda layer: dense if layer < first else sparse
    )


def expert_feed_forward_shapes(config: CheckpointConfig, has_expert_bias: bool) -> Shapes:
    """Return the shapes of one block's experts, and of the norm before them, by role. With
    `has_expert_bias`, the router has a bias.
    """
    width = config.get_int("moe_intermediate_size")
    shapes: Shapes = {
        **experts.sparse_feed_forward_shapes(config, width),
        **experts.shared_expert_shapes(config, config.get_int("n_shared_experts") * width),
    }
    if has_expert_bias:
        shapes["exp_probs_b.bias"] = (experts.expert_count(config),)
    return shapes
