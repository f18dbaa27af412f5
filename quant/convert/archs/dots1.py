"""dots.llm1: a norm of each query head and each key head, a few dense layers, then layers with
routed and shared experts.

Follows conversion/dots1.py and src/models/dots1.cpp of llama.cpp, which requires one key head for
each query head and has no sliding window.
"""

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, experts, layout, metadata, routers
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' Dots1Config
    "num_key_value_heads": 32,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "sliding_window": 4096,
    "max_window_layers": 62,
}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's dots1 computes differently. Return no notes."""
    scoring = config.values.get("scoring_func", "sigmoid")
    router = routers.router_problems(config, "noaux_tc" if scoring == "noaux_tc" else "sigmoid")
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            *router,
            checks.problem_biases(config, "attention_bias"),
            checks.problem_shared_keys(config),
            (_has_window(config), "some of its layers have a sliding window"),
        ],
    )
    return []


def _has_window(config: CheckpointConfig) -> bool:
    """Return whether some layer attends only to a sliding window that is shorter than the model's
    context. Without layer_types, the layers from max_window_layers on have the window.
    """
    if config.values["sliding_window"] is None:
        return False
    if config.get_int("sliding_window") >= config.get_int("max_position_embeddings"):
        return False
    if config.values.get("layer_types") is None:
        return layout.layer_count(config) > config.get_int("max_window_layers")
    return any(layout.sliding_layers(config, 1))


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the experts."""
    return [*metadata.common_keys(config), *routers.router_keys(config, experts.SIGMOID)]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.repeat_for_blocks(
            config, block_tensors.attention_shapes(config), block_tensors.head_norm_shapes(config)
        )
        | routers.feed_forward_shapes(config, has_expert_bias=True)
    )


DOTS1 = Arch(
    name="dots1",
    kind="DOTS1",
    hf=("Dots1ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=experts.stack_experts_and_name_biases,
    needs_head=True,
)

ARCHS = (DOTS1,)
