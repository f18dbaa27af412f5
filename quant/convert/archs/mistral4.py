"""Mistral 4 (text part): the compressed attention of DeepSeek V3, experts chosen by softmax, and
queries scaled by the logarithm of their position.

Follows conversion/mistral3.py, src/models/mistral4.cpp and src/models/deepseek2.cpp of llama.cpp.
llama.cpp's converter does not write the keys of the scale of queries for checkpoints in
transformers' format. Its graph and transformers apply the scale, so the keys are written here.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import deepseek2
from quant.convert.parts import checks, experts, rope
from quant.convert.parts.base import ArchKey, Shapes

BETA_KEY = "llama_4_scaling_beta"
WEIGHT_KEY = "rope.scaling.yarn_log_multiplier"
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA_KEY: 0.1,
}
DEFAULTS = {  # defaults of transformers' Mistral4Config
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 64,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "max_position_embeddings": 1048576,
}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with rope_parameters. A partial_rotary_factor that says how wide the rotary
    part of a head is, which qk_rope_head_dim says too, is left out.
    """
    parameters = config.values.get("rope_parameters") or config.values.get("rope_scaling")
    if parameters is None:
        return replace(config, values={**config.values, "rope_parameters": DEFAULT_ROPE})
    part = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    if isinstance(part, float) and part > 0:
        widths = deepseek2.mla_widths(config)
        if abs(part * widths.key_width - widths.rope_width) < 1e-6:
            parameters = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
    return replace(config, values={**config.values, "rope_parameters": parameters})


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's mistral4 computes differently; return notes for
    the user.
    """
    settings = rope.rope_settings(config)
    weight = next(
        (key.value for key in deepseek2.keys(config, experts.SOFTMAX) if key.name == WEIGHT_KEY),
        0.0,
    )
    assert isinstance(weight, float)
    checks.raise_problems(
        config,
        [
            (settings.values.get(BETA_KEY) is None, f"its rope_parameters have no {BETA_KEY}"),
            (
                min(abs(weight), abs(weight - 0.1)) > 1e-6,
                "its yarn factors mscale and mscale_all_dim differ",
            ),
        ],
    )
    return deepseek2.check_v3(config)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of DeepSeek V3, then those of the scale of queries."""
    settings = rope.rope_settings(config)
    length = settings.get_int(rope.ORIGINAL_LENGTH_KEY)
    return [
        *(
            key
            for key in deepseek2.keys(config, experts.SOFTMAX)
            if key.name != deepseek2.ATTN_FACTOR_KEY or key.value != 1.0
        ),
        ArchKey("attention.temperature_scale", "float32", settings.get_float(BETA_KEY)),
        ArchKey("attention.temperature_length", "uint32", length),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by GGUF name.
    Gates and ups of experts are in one tensor, as in llama.cpp's converter.
    """
    result: Shapes = {}
    for name, shape in deepseek2.required_shapes(config, has_expert_bias=False).items():
        if name.endswith(".ffn_gate_exps.weight"):
            name = name.replace("ffn_gate_exps", "ffn_gate_up_exps")
            shape = (shape[0], 2 * shape[1], shape[2])
        if not name.endswith(".ffn_up_exps.weight"):
            result[name] = shape
    return result


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with kv_b split and experts stacked."""
    routed = {name: item for name, item in tensors.items() if ".mlp.experts." in name}
    others = {name: item for name, item in tensors.items() if name not in routed}
    return deepseek2.prepare(config, others) | experts.stack_gate_up(config, routed)


MISTRAL4 = replace(
    deepseek2.V3,
    name="mistral4",
    kind="MISTRAL4",
    hf=("Mistral4ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=normalize,
    prepare=prepare,
    prediction_shapes=None,
    names={
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    },
)

ARCHS = (MISTRAL4,)
