"""GLM 4.5 to 4.7, the text part of GLM 4.5V and 4.6V, and Solar Open: rotary halves in a part of
each head, a few dense layers, then layers with routed and shared experts. The rotary positions of
GLM 4.5V have sections (mrope), of which text needs only one.

Follows Glm4MoeModel and SolarOpenModel of llama.cpp (conversion/glm.py, src/models/glm4-moe.cpp),
where the norm before the feed-forward has the name post_attention_norm.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs.qwen3_vl import section_keys, sections, without_sections
from quant.convert.parts import block_tensors, checks, experts, metadata, prediction, rope, routers
from quant.convert.parts.base import Arch, ArchKey, Shapes

SHARED_DEFAULTS = {  # defaults of transformers' Glm4MoeConfig and SolarOpenConfig
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
GLM_DEFAULTS = {
    **SHARED_DEFAULTS,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
SOLAR_DEFAULTS = {
    **SHARED_DEFAULTS,
    "moe_intermediate_size": 1280,
    "head_dim": 128,
    "rope_theta": 1000000.0,
}


VISION_DEFAULTS = {  # defaults of transformers' Glm4vMoeTextConfig
    **SHARED_DEFAULTS,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "attention_bias": True,
}
SECTIONS = [8, 12, 12]  # mrope_section in transformers, if config.json has none


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's glm4moe computes differently; return notes for
    the user.
    """
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config, allow_partial_rotary=True),
            *routers.router_problems(config, "sigmoid"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, the rotary width of a head, and the keys of the experts."""
    return [
        *metadata.common_keys(config),
        ArchKey("rope.dimension_count", "uint32", rope.rotary_width(config)),
        *routers.router_keys(config, experts.SIGMOID),
    ]


def check_vision(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's glm4moe computes differently with rotary
    sections; return notes for the user.
    """
    lengths, pairs = sections(config, SECTIONS), rope.rotary_width(config) // 2
    problem = f"the rotary sections {lengths} do not make {pairs} pairs"
    checks.raise_problems(config, [(sum(lengths) != pairs, problem)])
    return check(without_sections(config))


def vision_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of the text models, then that of the rotary sections."""
    return [*keys(config), *section_keys(config, SECTIONS)]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.repeat_for_blocks(config, _attention(config))
        | _with_norm_names(routers.feed_forward_shapes(config, has_expert_bias=True))
    )


def prediction_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors of the layer that predicts a further token, by role."""
    return (
        prediction.input_shapes(config)
        | _attention(config)
        | _with_norm_names(routers.expert_feed_forward_shapes(config, has_expert_bias=True))
    )


def _attention(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's attention and the norm before it, by role."""
    norms = block_tensors.head_norm_shapes(config) if config.get_bool("use_qk_norm") else {}
    biases = block_tensors.qkv_bias_shapes(config) if config.get_bool("attention_bias") else {}
    return block_tensors.attention_shapes(config) | norms | biases


def _with_norm_names(shapes: Shapes) -> Shapes:
    """Return shapes with llama.cpp's name for the norm before the feed-forward."""
    return {name.replace("ffn_norm.", "post_attention_norm."): shapes[name] for name in shapes}


GLM4_MOE = Arch(
    name="glm4moe",
    kind="GLM4_MOE",
    hf=("Glm4MoeForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=GLM_DEFAULTS,
    prepare=experts.stack_experts_and_name_biases,
    prediction_shapes=prediction_shapes,
)
SOLAR_OPEN = replace(GLM4_MOE, hf=("SolarOpenForCausalLM",), defaults=SOLAR_DEFAULTS)
GLM4V_MOE = replace(
    GLM4_MOE,
    hf=("Glm4vMoeForConditionalGeneration",),
    keys=vision_keys,
    check=check_vision,
    defaults=VISION_DEFAULTS,
)

ARCHS = (GLM4_MOE, SOLAR_OPEN, GLM4V_MOE)
