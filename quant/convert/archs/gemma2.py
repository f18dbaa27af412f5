"""Gemma 2: norms before and after attention and feed-forward, soft caps on attention scores and on
logits, and a sliding window on every second layer.

Follows conversion/gemma.py and src/models/gemma2.cpp of llama.cpp. llama.cpp always applies the
caps, ties the head to the embedding, and computes the scale of the queries itself.
"""

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, layout, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes, TensorOp

DEFAULTS = {  # defaults of transformers' Gemma2Config
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
PERIOD_LAYERS = 2  # the last layer of each period attends to all positions
LARGE_MODEL_LAYERS = 46  # layers of the 27B model, which scales queries differently


def query_scalar(config: CheckpointConfig, large_model_layers: int) -> int:
    """Return the query_pre_attn_scalar that llama.cpp uses, instead of the one in config.json. It
    differs for the largest model, which llama.cpp recognizes by its `large_model_layers` layers.
    """
    heads, _, head_dim = layout.head_counts(config)
    return (
        config.get_int("hidden_size") // heads
        if layout.layer_count(config) == large_model_layers
        else head_dim
    )


def gemma_problems(config: CheckpointConfig, large_model_layers: int) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp computes differently for both
    Gemma 2 and Gemma 3.
    """
    scalar_setting, computed = (
        config.values["query_pre_attn_scalar"],
        query_scalar(config, large_model_layers),
    )
    return [
        *checks.common_problems(
            config,
            rope_types=("default", "linear"),
            activations=("gelu_pytorch_tanh",),
            activation_key="hidden_activation",
        ),
        (
            scalar_setting != computed,
            f"its query_pre_attn_scalar is {scalar_setting}; llama.cpp computes with {computed}",
        ),
        checks.problem_biases(config, "attention_bias"),
        (config.get_bool("use_bidirectional_attention"), "it attends to later tokens"),
    ]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's gemma2 computes differently. Return
    no notes.
    """
    missing = [
        (config.values[key] is None, f"its {key} is null")
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    ]
    tied = config.get_bool("tie_word_embeddings")
    checks.raise_problems(
        config,
        [
            *gemma_problems(config, LARGE_MODEL_LAYERS),
            *missing,
            (not tied, "its head is not tied to the embedding"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of both soft caps and of the sliding window."""
    return [
        *metadata.common_keys(config),
        ArchKey("attn_logit_softcapping", "float32", config.get_float("attn_logit_softcapping")),
        ArchKey("final_logit_softcapping", "float32", config.get_float("final_logit_softcapping")),
        *metadata.sliding_window_keys(
            config, layout.sliding_layers(config, PERIOD_LAYERS), PERIOD_LAYERS
        ),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    block_shapes = (
        block_tensors.attention_shapes(config),
        block_tensors.feed_forward_shapes(config),
        block_tensors.post_norm_shapes(config),
    )
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, *block_shapes
    )


NORMS = (
    "attn_norm",
    "attn_q_norm",
    "attn_k_norm",
    "post_attention_norm",
    "ffn_norm",
    "post_ffw_norm",
    "output_norm",
)
NORM_SHIFT_OPS: dict[str, TensorOp] = dict.fromkeys(
    NORMS, lambda config, tensor: tensor_views.add_one(tensor)
)

GEMMA2 = Arch(
    name="gemma2",
    kind="GEMMA2",
    hf=("Gemma2ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    ops=NORM_SHIFT_OPS,
)

ARCHS = (GEMMA2,)
