"""Nemotron H: every layer is a state-space layer of Mamba 2, an attention layer without positions,
a feed-forward, or experts with a shared expert.

Follows NemotronHModel of llama.cpp (conversion/nemotron.py, src/models/nemotron-h.cpp). Models with
experts are llama.cpp's nemotron_h_moe. llama.cpp finds the kind of a layer by the numbers that its
metadata has for each layer: an attention layer has key-value heads, and a feed-forward or experts
have a width. Heads are reordered as there, although they have no positions. Differences: the
context length is that of config.json, and there is no rotary width.

The layer of models with experts that predicts a further token (MTP) is stored as two, an attention
layer and one of experts, which llama.cpp has as one block. The last norm of this block subtracts
the mean in llama.cpp.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import (
    block_tensors,
    checks,
    experts,
    layout,
    prediction,
    rope,
    routers,
    state_space,
)
from quant.convert.parts.base import Arch, ArchKey, Shapes
from quant.convert.parts.state_space import Mamba2Widths

if TYPE_CHECKING:
    from quant.native.ggml import F32

RECURRENT, ATTENTION, FEED_FORWARD, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
# hybrid_override_pattern has one letter for each layer.
LETTERS = {"M": RECURRENT, "*": ATTENTION, "-": FEED_FORWARD, "E": EXPERTS}
OLD_NAMES = {"mamba": RECURRENT, "attention": ATTENTION}
# The setting with the kinds of all layers, and all that config.json may have.
KINDS_SETTING = "layers_block_type"
KINDS_SETTINGS = (KINDS_SETTING, "layer_types", "hybrid_override_pattern")
COUNT_SETTING = "num_nextn_predict_layers"
# A tensor of one of the two layers that are the block that predicts a further token
MTP_NAME = re.compile(r"mtp\.layers\.([01])\.(.+)", re.DOTALL)
# Its names in these layers -> names in the block, where they are not equal
MTP_NAMES = {
    ("1", "norm.weight"): "post_attention_layernorm.weight",
    ("1", "final_layernorm.weight"): "shared_head.norm.weight",
}
# Names that the gguf package has in "model." only
MODEL_NAME = re.compile(
    r"model\.layers\.\d{1,4}\."
    r"(eh_proj|enorm|hnorm|shared_head\.norm|post_attention_layernorm)\.weight"
)
EXPERT_NAME = re.compile(r"backbone\.(layers\.\d{1,4})\.mixer\.(experts\..+)", re.DOTALL)
DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the settings with the kinds of all layers in layers_block_type, in the words of
    transformers 5, and with their number.
    """
    kinds = next((v for name in KINDS_SETTINGS if (v := config.values.get(name)) is not None), None)
    if isinstance(kinds, str):
        kinds = [LETTERS.get(letter, letter) for letter in kinds]
    if not isinstance(kinds, list):
        return config
    kinds = [OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    changes = {KINDS_SETTING: kinds, "num_hidden_layers": len(kinds)}
    return replace(config, values={**config.values, **changes})


def layer_kinds(config: CheckpointConfig) -> list[str]:
    """Return the kind of each layer. Raises UserError if they are missing or unknown."""
    kinds = config.values.get(KINDS_SETTING)
    layout.layers_of_kind(
        config, KINDS_SETTING, tuple(LETTERS.values()), (), label=" or ".join(KINDS_SETTINGS)
    )
    return list(kinds) if isinstance(kinds, list) else []


def has_experts(config: CheckpointConfig) -> bool:
    """Return whether the model has layers of experts."""
    kinds = config.values.get(KINDS_SETTING)
    return isinstance(kinds, list) and EXPERTS in kinds


def widths(config: CheckpointConfig) -> Mamba2Widths:
    """Return the widths of the state-space layers that config.json describes."""
    heads = config.get_int("mamba_num_heads")
    return Mamba2Widths(
        inner=heads * config.get_int("mamba_head_dim"),
        state=config.get_int("ssm_state_size"),
        groups=config.get_int("n_groups"),
        heads=heads,
        kernel=config.get_int("conv_kernel"),
    )


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's nemotron_h computes differently; return notes
    for the user.
    """
    activations = config.values.get("mlp_hidden_act"), config.values.get("mamba_hidden_act")
    problems = [
        checks.problem_uneven_heads(config),
        (
            activations != ("relu2", "silu"),
            f"its activations are {activations[0]} and {activations[1]}",
        ),
        *state_space.width_problems(widths(config)),
        state_space.problem_step_limit(config),
        checks.problem_biases(config, "use_bias"),
    ]
    if has_experts(config):
        group_count, used_groups = routers.expert_groups(config)
        total = experts.expert_count(config)
        problems += [
            *experts.expert_problems(config),
            (
                FEED_FORWARD in layer_kinds(config),
                "some layers have no experts, but a feed-forward",
            ),
            checks.problem_biases(config, "mlp_bias"),
            (
                total % group_count or group_count >= total > 1,
                f"{total} experts cannot be split into {group_count} groups",
            ),
            (
                experts.used_expert_count(config) > total // group_count * used_groups,
                f"it uses more experts than {used_groups} groups have",
            ),
        ]
    checks.raise_problems(config, problems)
    if config.values.get(COUNT_SETTING) and not converts_prediction(config):
        supported = "one" if has_experts(config) else "them with experts only"
        return [
            "its layers that predict further tokens (MTP) are not converted: llama.cpp supports "
            + supported
        ]
    return []


def converts_prediction(config: CheckpointConfig) -> bool:
    """Return whether a layer that predicts a further token is converted. llama.cpp supports one, of
    models with experts. Some config.json do not count these layers.
    """
    return has_experts(config) and config.values.get(COUNT_SETTING) in (None, 0, 1)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of a model without experts."""
    return _keys(config, FEED_FORWARD, config.get_int("intermediate_size"))


def expert_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of a model with experts."""
    width, (group_count, used_groups) = (
        config.get_int("moe_intermediate_size"),
        routers.expert_groups(config),
    )
    shared = config.get_int("moe_shared_expert_intermediate_size")
    entries = [
        *_keys(config, EXPERTS, width),
        *experts.expert_keys(config),
        ArchKey("expert_feed_forward_length", "uint32", width),
        ArchKey("expert_shared_feed_forward_length", "uint32", shared),
        ArchKey("expert_shared_count", "uint32", config.get_int("n_shared_experts")),
        ArchKey("expert_weights_norm", "bool", config.get_bool("norm_topk_prob")),
        ArchKey("expert_weights_scale", "float32", config.get_float("routed_scaling_factor")),
        ArchKey("expert_group_count", "uint32", group_count),
        ArchKey("expert_group_used_count", "uint32", used_groups),
    ]
    if latent := latent_width(config):
        entries.append(ArchKey("moe_latent_size", "uint32", latent))
    return entries


def latent_width(config: CheckpointConfig) -> int:
    """Return the width of the experts' compressed input, 0 if it is not compressed."""
    if config.values.get("moe_latent_size") is None:
        return 0
    return config.get_int("moe_latent_size")


def _keys(config: CheckpointConfig, wide_kind: str, width: int) -> list[ArchKey]:
    """Return the metadata keys of all models. Layers of `wide_kind` have a feed-forward of
    `width`.
    """
    (count, kv_heads, head_dim), kinds = layout.head_counts(config), layer_kinds(config)
    n_predicting = prediction.layer_count(config)
    kv_counts = [kv_heads if kind == ATTENTION else 0 for kind in kinds] + [kv_heads] * n_predicting
    lengths = [width if kind == wide_kind else 0 for kind in kinds] + [width] * n_predicting
    return [
        ArchKey("block_count", "uint32", len(kinds)),
        ArchKey("context_length", "uint32", config.get_int("max_position_embeddings")),
        ArchKey("embedding_length", "uint32", config.get_int("hidden_size")),
        ArchKey("feed_forward_length", "array:int32", lengths),
        ArchKey("attention.head_count", "uint32", count),
        ArchKey("attention.head_count_kv", "array:int32", kv_counts),
        ArchKey("attention.layer_norm_epsilon", "float32", config.get_float("layer_norm_epsilon")),
        ArchKey("attention.key_length", "uint32", head_dim),
        ArchKey("attention.value_length", "uint32", head_dim),
        ArchKey("rope.scaling.finetuned", "bool", False),
        ArchKey("vocab_size", "uint32", config.get_int("vocab_size")),
        *state_space.state_keys(widths(config)),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, kinds = config.get_int("hidden_size"), layer_kinds(config)
    norm: Shapes = {"attn_norm.weight": (hidden,)}
    roles = {
        RECURRENT: norm | state_space.state_shapes(widths(config), hidden, has_conv_bias(config)),
        ATTENTION: block_tensors.attention_shapes(config),
        FEED_FORWARD: norm | _feed_forward_shapes(hidden, config.get_int("intermediate_size")),
        EXPERTS: norm | (_expert_shapes(config) if has_experts(config) else {}),
    }
    return block_tensors.embedding_and_head(config) | block_tensors.shapes_by_block(
        len(kinds), lambda layer: roles[kinds[layer]]
    )


def prediction_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors of the block that predicts a further token, by role."""
    hidden = config.get_int("hidden_size")
    return (
        prediction.input_shapes(config)
        | block_tensors.attention_shapes(config)
        | _expert_shapes(config)
        | {
            "post_attention_norm.weight": (hidden,),
            "nextn.shared_head_norm.weight": (hidden,),
        }
    )


def prediction_name(config: CheckpointConfig, name: str) -> str:
    """Return the name of a tensor of the two layers that predict a further token as one of their
    block; any other name unchanged. If there are more such layers, no name changes.
    """
    match = MTP_NAME.fullmatch(name)
    if match is None or not converts_prediction(config):
        return name
    layer, rest = match.groups()
    block = config.get_int("num_hidden_layers")
    return f"model.layers.{block}.{MTP_NAMES.get((layer, rest), rest)}"


def _feed_forward_shapes(hidden: int, width: int) -> Shapes:
    return {"ffn_up.weight": (width, hidden), "ffn_down.weight": (hidden, width)}


def _expert_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one layer of experts, by role."""
    hidden, count, latent = (
        config.get_int("hidden_size"),
        experts.expert_count(config),
        latent_width(config),
    )
    width, shared = (
        config.get_int("moe_intermediate_size"),
        config.get_int("moe_shared_expert_intermediate_size"),
    )
    inner = latent or hidden
    shapes: Shapes = {
        "ffn_gate_inp.weight": (count, hidden),
        "exp_probs_b.bias": (count,),
        "ffn_up_exps.weight": (count, width, inner),
        "ffn_down_exps.weight": (count, inner, width),
        "ffn_up_shexp.weight": (shared, hidden),
        "ffn_down_shexp.weight": (hidden, shared),
    }
    if latent:
        shapes["ffn_latent_down.weight"] = (latent, hidden)
        shapes["ffn_latent_up.weight"] = (hidden, latent)
    return shapes


def optional_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the biases that feed-forwards can have."""
    kinds = layer_kinds(config)
    biases: Shapes = {
        "ffn_up.bias": (config.get_int("intermediate_size"),),
        "ffn_down.bias": (config.get_int("hidden_size"),),
    }
    return block_tensors.shapes_by_block(
        len(kinds), lambda layer: biases if kinds[layer] == FEED_FORWARD else {}
    )


def has_conv_bias(config: CheckpointConfig) -> bool:
    """Return whether the convolutions have biases."""
    return config.get_bool("use_conv_bias", default=True)


def extra_tensors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return biases of zero for convolutions without them."""
    if has_conv_bias(config):
        return {}
    recurrent = [layer for layer, kind in enumerate(layer_kinds(config)) if kind == RECURRENT]
    return state_space.zero_biases(widths(config), recurrent)


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked and those of the state-space layers as llama.cpp
    stores them, under names that the gguf package knows. MTP layers that are not converted are left
    out.
    """
    if not converts_prediction(config):
        tensors = {name: item for name, item in tensors.items() if not name.startswith("mtp.")}
    prepared = state_space.prepare_mixers(config.get_int("n_groups"), tensors)
    result = block_tensors.rename_tensors(prepared, _known_name)
    if not has_experts(config):
        return result
    return {
        # transformers 5 has all experts in one tensor, which is a parameter without ".weight"
        f"{name}.weight" if name.endswith(".mlp.experts.up_proj") else name: tensor
        for name, tensor in experts.stack_experts(config, result).items()
    }


def _known_name(name: str) -> str:
    """Return the name of a tensor in the gguf package's tables, or of experts as stack_experts()
    reads it.
    """
    if MODEL_NAME.fullmatch(name):
        return name
    known = re.sub(r"^model\.", "backbone.", name)
    if match := EXPERT_NAME.fullmatch(known):
        known = f"model.{match[1]}.mlp.{match[2]}"
    return known.replace("e_score_correction_bias", "e_score_correction.bias")


def select(config: CheckpointConfig) -> Arch:
    """Return the family that the layers of config.json need."""
    return NEMOTRON_H_MOE if has_experts(config) else NEMOTRON_H


NEMOTRON_H = Arch(
    name="nemotron_h",
    kind="NEMOTRON_H",
    hf=("NemotronHForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    optional_shapes=optional_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    ops=rope.INTERLEAVE_OPS,
    extra_tensors=extra_tensors,
    normalize=normalize,
    select=select,
)
NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    kind="NEMOTRON_H_MOE",
    keys=expert_keys,
    prediction_shapes=prediction_shapes,
    prediction_name=prediction_name,
)

ARCHS = (NEMOTRON_H,)
