"""gpt-oss: a mixture of experts with biases everywhere, attention sinks, and a sliding window on
every second layer.

Follows conversion/gpt_oss.py and src/models/openai-moe.cpp of llama.cpp. Experts are stored either
as MXFP4, whose blocks are copied, or as transposed floats. In both forms the rows of gate and up
alternate in one matrix.
"""

from collections.abc import Iterator
from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.parts import block_tensors, checks, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # LLM_FFN_SWIGLU_OAI_MOE, src/llama-graph.cpp
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": SWIGLU_LIMIT,
    "swiglu_alpha": SWIGLU_ALPHA,
}
PERIOD_LAYERS = 2  # the last layer of each period attends to all positions


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's gpt-oss computes differently; return notes for
    the user.
    """
    (experts, used_experts), values = _expert_counts(config), config.values
    without_rope = not any(
        isinstance(values.get(key), dict) for key in ("rope_scaling", "rope_parameters")
    )
    limit, alpha = values["swiglu_limit"], values["swiglu_alpha"]
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config, rope_types=("default", "linear", "yarn"), allow_rounded_ramp=True
            ),
            (without_rope, "it has neither rope_scaling nor rope_parameters"),
            (not config.get_bool("attention_bias"), "its attention has no biases"),
            (limit != SWIGLU_LIMIT, f"its swiglu_limit is {limit}; llama.cpp has {SWIGLU_LIMIT}"),
            (alpha != SWIGLU_ALPHA, f"its swiglu_alpha is {alpha}; llama.cpp has {SWIGLU_ALPHA}"),
            (used_experts > experts, f"it uses {used_experts} of {experts} experts"),
        ],
    )
    return rope.yarn_ramp_notes(config)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the sliding window and of the experts."""
    experts, used_experts = _expert_counts(config)
    return [
        *metadata.common_keys(config),
        *metadata.sliding_window_keys(
            config, layout.sliding_layers(config, PERIOD_LAYERS), PERIOD_LAYERS
        ),
        ArchKey("expert_count", "uint32", experts),
        ArchKey("expert_used_count", "uint32", used_experts),
        ArchKey("expert_feed_forward_length", "uint32", config.get_int("intermediate_size")),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, ff, count = (
        config.get_int("hidden_size"),
        config.get_int("intermediate_size"),
        layout.head_counts(config)[0],
    )
    experts, _ = _expert_counts(config)
    block: Shapes = {
        "attn_output.bias": (hidden,),
        "attn_sinks.weight": (count,),
        "post_attention_norm.weight": (hidden,),
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_inp.bias": (experts,),
        "ffn_gate_exps.weight": (experts, ff, hidden),
        "ffn_gate_exps.bias": (experts, ff),
        "ffn_up_exps.weight": (experts, ff, hidden),
        "ffn_up_exps.bias": (experts, ff),
        "ffn_down_exps.weight": (experts, hidden, ff),
        "ffn_down_exps.bias": (experts, hidden),
    }
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, block_tensors.attention_shapes(config), block_tensors.qkv_bias_shapes(config), block
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors under names that the gguf package knows. Gate and up are split, and
    experts that are stored as floats are transposed.
    """
    prepared = [result for tensor in tensors.values() for result in _split_tensor(tensor)]
    return {tensor.name: tensor for tensor in prepared}


def _split_tensor(tensor: LazyTensor) -> Iterator[LazyTensor]:
    """Yield the tensors into which one checkpoint tensor is converted: several for a fused tensor
    of experts, else a single one.
    """
    stem, _, last = tensor.name.rpartition(".")
    if last == "sinks":
        yield replace(tensor, name=f"{tensor.name}.weight")
    elif last == "down_proj_bias":
        yield replace(tensor, name=f"{stem}.down_proj.bias")
    elif last == "gate_up_proj_bias":
        for start, name in enumerate(("gate_proj", "up_proj")):
            yield replace(tensor_views.pick_columns(tensor, start, 2), name=f"{stem}.{name}.bias")
    elif last in ("down_proj", "gate_up_proj") and len(tensor.shape) == 3:
        matrices = tensor if tensor.dtype == "MXFP4" else tensor_views.transpose(tensor)
        if last == "down_proj":
            yield replace(matrices, name=f"{tensor.name}.weight")
            return
        for start, name in enumerate(("gate_proj", "up_proj")):
            yield replace(
                tensor_views.pick_range(matrices, start, matrices.shape[-2], 2),
                name=f"{stem}.{name}.weight",
            )
    else:
        yield tensor


def _expert_counts(config: CheckpointConfig) -> tuple[int, int]:
    """Return the number of experts in a layer, and the number that each token is routed to."""
    return config.get_int("num_local_experts"), config.get_int(
        "num_experts_per_tok", "experts_per_token"
    )


GPT_OSS = Arch(
    name="gpt-oss",
    kind="GPT_OSS",
    hf=("GptOssForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    needs_head=True,
    prepare=prepare,
)

ARCHS = (GPT_OSS,)
