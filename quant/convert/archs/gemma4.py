"""Gemma 4, text only: layers with a sliding window and global layers have heads of different
widths; the last layers can reuse the keys and values of earlier ones; each layer can add an
embedding of the token of its own; each layer can have experts beside its feed-forward.

Follows conversion/gemma.py and src/models/gemma4.cpp of llama.cpp. The graph computes the values of
a global layer from its keys if the layer has no value matrix (attention_k_eq_v). Checkpoints may
contain the keys and values of layers that reuse those of earlier layers. llama.cpp's converter
keeps these tensors, but neither its graph nor transformers uses them. Here they are left out.

The widths of global layers are in per_layer_config (transformers 5), or in global_head_dim and
num_global_key_value_heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, experts, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

if TYPE_CHECKING:
    from quant.native.ggml import F32

PERIOD_LAYERS = 6  # the last layer of each period attends to all positions
DEFAULT_GLOBAL_HEAD_DIM = 512
LAYER_TYPES = ("sliding_attention", "full_attention")
DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
}
DEFAULTS: dict[str, Any] = {  # defaults of transformers' Gemma4TextConfig
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
# Global layers rotate the first pairs of a head only. The others get a factor that stops rotation.
NO_ROTATION = 1e30


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of one layer: the number of key-value heads, and the width of a head in values."""

    kv_heads: int
    head_dim: int


def optional_count(config: CheckpointConfig, key: str) -> int:
    """Return a setting that is a positive number, or 0 if it is 0, null or missing."""
    return config.get_int(key) if config.values.get(key) else 0


def with_rope(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with rotary settings for both types of layers. transformers uses
    DEFAULT_ROPE if rope_parameters is missing.
    """
    if config.values.get("rope_parameters") is not None:
        return config
    return replace(config, values={**config.values, "rope_parameters": DEFAULT_ROPE})


def sliding_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer has a sliding window. The last
    layer never has one, as in transformers.
    """
    return [*layout.sliding_layers(config, PERIOD_LAYERS)[:-1], False]


def layer_heads(config: CheckpointConfig) -> list[LayerHeads]:
    """Return the heads of each layer."""
    _, kv_heads, head_dim = layout.head_counts(config)
    normal, overrides = LayerHeads(kv_heads, head_dim), config.values.get("per_layer_config")
    if isinstance(overrides, dict):
        return [
            _override_heads(config, normal, overrides.get(str(layer), overrides.get(layer)))
            for layer in range(layout.layer_count(config))
        ]
    is_overridden = config.get_bool("attention_k_eq_v")
    wide = LayerHeads(
        config.get_int("num_global_key_value_heads", default=kv_heads)
        if is_overridden
        else kv_heads,
        config.get_int("global_head_dim", default=DEFAULT_GLOBAL_HEAD_DIM),
    )
    return [normal if is_sliding else wide for is_sliding in sliding_layers(config)]


def _override_heads(config: CheckpointConfig, heads: LayerHeads, settings: object) -> LayerHeads:
    """Return `heads` with the settings of one layer in per_layer_config, if there are any."""
    if not isinstance(settings, Mapping):
        return heads
    layer = CheckpointConfig(settings, config.location)
    return LayerHeads(
        layer.get_int("num_key_value_heads", default=heads.kv_heads),
        layer.get_int("head_dim", default=heads.head_dim),
    )


def global_heads(config: CheckpointConfig) -> LayerHeads:
    """Return the heads of the global layers. The last layer is always global."""
    return layer_heads(config)[-1]


def first_shared_layer(config: CheckpointConfig) -> int:
    """Return the number of the first layer that reuses the keys and values of an earlier layer, or
    the number of layers if there is none.
    """
    return max(0, layout.layer_count(config) - optional_count(config, "num_kv_shared_layers"))


def feed_forward_widths(config: CheckpointConfig) -> list[int]:
    """Return the width of each layer's feed-forward. It can be doubled in layers that reuse keys
    and values (use_double_wide_mlp).
    """
    width, first = config.get_int("intermediate_size"), first_shared_layer(config)
    factor = 2 if config.get_bool("use_double_wide_mlp") else 1
    return [width if i < first else width * factor for i in range(layout.layer_count(config))]


def sharing_problems(
    config: CheckpointConfig, sliding: list[bool], first: int
) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of layers that reuse keys and values. `first` is the
    number of the first such layer.

    transformers reuses those of the last earlier layer of the same type. llama.cpp uses layer
    `first` - 1 for global layers, and layer `first` - 2 for layers with a window.
    """
    reused = {
        kind: max((i for i in range(first) if sliding[i] is kind), default=-1)
        for kind in set(sliding[first:])
    }
    return [
        (first < 2, "fewer than two layers have keys and values of their own"),
        (
            any(layer != first - (2 if kind else 1) for kind, layer in reused.items()),
            "layers that reuse keys and values do not follow a layer with a window and a global one",
        ),
    ]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's gemma4 computes differently. Return no
    notes.
    """
    config = with_rope(config)
    sliding, heads, values = sliding_layers(config), layer_heads(config), config.values
    parameters, overrides = values["rope_parameters"], values.get("per_layer_config")
    count, widest = config.get_int("num_attention_heads"), heads[-1]
    is_overrides_valid = overrides is None or (
        isinstance(overrides, Mapping)
        and all(
            isinstance(layer, Mapping) and not layer.keys() - {"head_dim", "num_key_value_heads"}
            for layer in overrides.values()
        )
    )
    kinds = {
        kind: {
            layer for layer, is_sliding in zip(heads, sliding, strict=True) if is_sliding is kind
        }
        for kind in (True, False)
    }
    local = rope.rope_settings(config, LAYER_TYPES[0]).values
    vocab, embedded = config.get_int("vocab_size"), values.get("vocab_size_per_layer_input")
    checks.raise_problems(
        config,
        [
            *checks.common_problems(
                config,
                rope_types=("default", "proportional"),
                activations=("gelu_pytorch_tanh",),
                activation_key="hidden_activation",
                allow_partial_rotary=True,
            ),
            *sharing_problems(config, sliding, first_shared_layer(config)),
            *(experts.expert_problems(_expert_config(config)) if has_experts(config) else ()),
            (not is_overrides_valid, "its per_layer_config has unknown settings"),
            (
                any(len(layers) > 1 for layers in kinds.values()),
                "layers of the same type have heads of different widths",
            ),
            (
                count % widest.kv_heads,
                f"{count} heads cannot share {widest.kv_heads} key-value heads",
            ),
            (
                widest.head_dim % 2,
                f"global heads have {widest.head_dim} values: rotary halves need an even number",
            ),
            (
                not isinstance(parameters, dict) or not parameters.keys() >= set(LAYER_TYPES),
                "its rope_parameters do not have settings for both types of layers",
            ),
            (local["rope_type"] != "default", "its layers with a window have scaled positions"),
            checks.problem_biases(config, "attention_bias"),
            (values.get("use_bidirectional_attention") == "all", "it attends to later tokens"),
            (values.get("sliding_window") is None, "its sliding_window is null"),
            (not any(sliding), "it has no layer with a sliding window"),
            (
                per_layer_width(config) and embedded not in (None, vocab),
                f"{embedded} tokens have embeddings for each layer, not {vocab}",
            ),
        ],
    )
    return []


def has_experts(config: CheckpointConfig) -> bool:
    """Return whether the layers have experts beside their feed-forward."""
    return config.get_bool("enable_moe_block")


def _expert_config(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the name of the number of used experts that experts.py reads."""
    return replace(
        config,
        values={**config.values, "num_experts_per_tok": config.values.get("top_k_experts")},
    )


def per_layer_width(config: CheckpointConfig) -> int:
    """Return the width of the embedding that each layer adds, or 0 if there is none."""
    return optional_count(config, "hidden_size_per_layer_input")


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, with lists of numbers where layers differ, then the keys of
    the two types of layers, of the embeddings for each layer and of the experts.
    """
    config = with_rope(config)
    sliding, heads, wide = sliding_layers(config), layer_heads(config), global_heads(config)
    head_dim, widths = layout.head_counts(config)[2], feed_forward_widths(config)
    kv_heads = [layer.kv_heads for layer in heads]
    changes = {
        "attention.key_length": ArchKey("attention.key_length", "uint32", wide.head_dim),
        "attention.value_length": ArchKey("attention.value_length", "uint32", wide.head_dim),
    }
    if config.get_bool("use_double_wide_mlp"):
        changes["feed_forward_length"] = ArchKey("feed_forward_length", "array:int32", widths)
    if len(set(kv_heads)) > 1:
        changes["attention.head_count_kv"] = ArchKey(
            "attention.head_count_kv", "array:int32", kv_heads
        )
    local = rope.rope_settings(config, LAYER_TYPES[0])
    shared_layers = layout.layer_count(config) - first_shared_layer(config)
    entries = [changes.get(key.name, key) for key in metadata.common_keys(config)]
    entries += [
        ArchKey("rope.freq_base_swa", "float32", local.get_float("rope_theta")),
        ArchKey("attention.sliding_window", "uint32", config.get_int("sliding_window")),
        ArchKey("attention.sliding_window_pattern", "array:bool", sliding),
        ArchKey("attention.shared_kv_layers", "uint32", shared_layers),
        ArchKey("attention.key_length_swa", "uint32", head_dim),
        ArchKey("attention.value_length_swa", "uint32", head_dim),
        ArchKey("rope.dimension_count", "uint32", wide.head_dim),
        ArchKey("rope.dimension_count_swa", "uint32", head_dim),
        ArchKey("embedding_length_per_layer_input", "uint32", per_layer_width(config)),
    ]
    # llama.cpp caps logits at 30 if the key is missing, and does not cap them if it is 0
    is_capped = config.values.get("final_logit_softcapping") is not None
    cap = config.get_float("final_logit_softcapping") if is_capped else 0.0
    entries.append(ArchKey("final_logit_softcapping", "float32", cap))
    if has_experts(config):
        width = config.get_int("moe_intermediate_size")
        entries += experts.expert_keys(_expert_config(config))
        entries.append(ArchKey("expert_feed_forward_length", "uint32", width))
    return entries


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, vocab = config.get_int("hidden_size"), config.get_int("vocab_size")
    layers, width = layout.layer_count(config), per_layer_width(config)
    heads, sliding, widths = (
        layer_heads(config),
        sliding_layers(config),
        feed_forward_widths(config),
    )
    first, is_value_missing = first_shared_layer(config), config.get_bool("attention_k_eq_v")
    common = block_tensors.post_norm_shapes(config)
    if has_experts(config):
        common |= _expert_shapes(config)
    if width:
        common |= {
            "inp_gate.weight": (width, hidden),
            "proj.weight": (hidden, width),
            "post_norm.weight": (hidden,),
        }

    def block_shapes(layer: int) -> Shapes:
        layer_config = replace(
            config,
            values={
                **config.values,
                "head_dim": heads[layer].head_dim,
                "num_key_value_heads": heads[layer].kv_heads,
                "intermediate_size": widths[layer],
            },
        )
        attention = block_tensors.attention_shapes(layer_config) | block_tensors.head_norm_shapes(
            layer_config
        )
        left_out: set[str] = set()
        if layer >= first:
            left_out = {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}
        elif is_value_missing and not sliding[layer]:
            left_out = {"attn_v.weight"}
        return {
            role: shape
            for role, shape in (
                attention | block_tensors.feed_forward_shapes(layer_config) | common
            ).items()
            if role not in left_out
        }

    shapes = block_tensors.embedding_and_head(config) | block_tensors.shapes_by_block(
        layers, block_shapes
    )
    if width:
        shapes |= {
            "per_layer_token_embd.weight": (vocab, layers * width),
            "per_layer_model_proj.weight": (layers * width, hidden),
            "per_layer_proj_norm.weight": (width,),
        }
    return shapes


def _expert_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's router, experts, and the norms around them, by role."""
    hidden, count = config.get_int("hidden_size"), experts.expert_count(config)
    width = config.get_int("moe_intermediate_size")
    return {
        "ffn_gate_inp.weight": (count, hidden),
        "ffn_gate_inp.scale": (hidden,),
        "ffn_gate_up_exps.weight": (count, 2 * width, hidden),
        "ffn_down_exps.weight": (count, hidden, width),
        "ffn_down_exps.scale": (count,),
        "pre_ffw_norm_2.weight": (hidden,),
        "post_ffw_norm_1.weight": (hidden,),
        "post_ffw_norm_2.weight": (hidden,),
    }


def optional_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the factors by which the output of each layer is multiplied."""
    return block_tensors.repeat_for_blocks(config, {"layer_output_scale.weight": (1,)})


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors without keys and values that no layer uses, and with the experts of each
    layer stacked.
    """
    unused = tuple(
        f"layers.{layer}.self_attn.{name}.weight"
        for layer in range(first_shared_layer(config), layout.layer_count(config))
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    return experts.stack_gate_up(
        config,
        {name: tensor for name, tensor in tensors.items() if not name.endswith(unused)},
    )


def rope_factors(config: CheckpointConfig) -> "dict[str, F32]":
    """Return the factors of the rotary frequencies of global layers as the tensor rope_freqs.weight
    `[head_dim / 2]`. In a proportional rope, only a part of the pairs rotates.
    """
    import numpy as np

    config = with_rope(config)
    settings, head_dim = rope.rope_settings(config), global_heads(config).head_dim
    part = rope.rotary_width(
        replace(config, values={**config.values, "head_dim": head_dim}),
    )
    rotated, factor = part // 2, settings.get_float("factor", 1.0)
    if settings.values["rope_type"] == "default":
        rotated, factor = head_dim // 2, 1.0
    factors = [factor] * rotated + [NO_ROTATION] * (head_dim // 2 - rotated)
    return {"rope_freqs.weight": np.array(factors, np.float32)}


GEMMA4 = Arch(
    name="gemma4",
    kind="GEMMA4",
    hf=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    keys=keys,
    required_shapes=required_shapes,
    optional_shapes=optional_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    names={
        "layer_scalar": "layer_output_scale",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        "experts.down_proj": "ffn_down_exps",
    },
    extra_tensors=rope_factors,
)

ARCHS = (GEMMA4,)
