"""Nomic BERT: an encoder like BERT with rotary positions and a gated feed-forward.

Follows NomicBertModel of llama.cpp (conversion/bert.py, src/models/nomic-bert.cpp). As there,
checkpoints in the spelling of Nomic's own code have the context with which they were trained.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import bert
from quant.convert.parts import block_tensors, checks, layout, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

# Settings of Nomic's own code -> those of transformers.
OLD_SETTINGS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Settings of Nomic's own code that must have this value.
FIXED_SETTINGS: Mapping[str, Any] = {
    "activation_function": "swiglu",
    "causal": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
}
# Names of transformers 5 -> those of Nomic's own code, which the gguf package knows.
OLD_NAMES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}
PREFIX = re.compile(r"^(?:nomic_bert|bert|model)\.")
LAYER_NAME = re.compile(r"(?:encoder\.)?layers\.(\d{1,4})\.(.+)\.(weight|bias)", re.DOTALL)
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "max_position_embeddings": 2048,
}


def normalize(config: CheckpointConfig) -> CheckpointConfig:
    """Return the settings in the spelling of transformers."""
    values = dict(config.values)
    for old, new in OLD_SETTINGS.items():
        if values.get(old) is not None:
            values[new] = values[old]
    trained = values.get("max_trained_positions")
    length = values.get("max_position_embeddings")
    if type(trained) is int and type(length) is int and 0 < trained < length:
        values["max_position_embeddings"] = trained
    return replace(config, values=values)


def rope_settings(config: CheckpointConfig) -> CheckpointConfig:
    """Return the rotary settings. The base is 1000 by default."""
    theta = config.values.get("rope_theta")
    values = {**config.values, "rope_theta": 1000.0 if theta is None else theta}
    return rope.rope_settings(replace(config, values=values))


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's nomic-bert computes differently. Return no
    notes.
    """
    values, settings = config.values, rope_settings(config)
    heads, hidden = config.get_int("num_attention_heads"), config.get_int("hidden_size")
    width = config.get_int("head_dim", default=max(1, hidden // heads))
    differing = [
        f"{name} is {values[name]!r}"
        for name, value in FIXED_SETTINGS.items()
        if values.get(name) not in (None, value)
    ]
    checks.raise_problems(
        config,
        [
            *bert.encoder_problems(config),
            (differing, "; ".join(differing)),
            (values.get("moe_every_n_layers"), "some of its layers have experts"),
            (values.get("hidden_act") != "silu", f"its activation is {values.get('hidden_act')}"),
            (
                settings.values["rope_type"] != "default"
                or settings.values.get("partial_rotary_factor") not in (None, 1),
                "its positions are scaled, or a part of each head is rotary",
            ),
            (width * heads != hidden, f"its {heads} heads of {width} values do not make {hidden}"),
            (width % 2, f"its heads have {width} values: rotary halves need an even number"),
        ],
    )
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return BERT's metadata keys and the rotary base."""
    return [
        *bert.keys(config),
        ArchKey("rope.freq_base", "float32", rope_settings(config).get_float("rope_theta")),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    hidden, ff = config.get_int("hidden_size"), config.get_int("intermediate_size")
    norms = {
        f"{name}.{kind}": (hidden,)
        for name in ("attn_output_norm", "layer_output_norm")
        for kind in ("weight", "bias")
    }
    block: Shapes = {
        "attn_qkv.weight": (3 * hidden, hidden),
        "attn_output.weight": (hidden, hidden),
        "ffn_gate.weight": (ff, hidden),
        "ffn_up.weight": (ff, hidden),
        "ffn_down.weight": (hidden, ff),
        **norms,
    }
    return {
        "token_embd.weight": (config.get_int("vocab_size"), hidden),
        "token_types.weight": (config.get_int("type_vocab_size"), hidden),
        "token_embd_norm.weight": (hidden,),
        "token_embd_norm.bias": (hidden,),
        **block_tensors.repeat_for_blocks(config, block),
    }


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors under names that the gguf package knows, with queries, keys and values in
    one matrix, and without the heads for training.
    """
    result = block_tensors.rename_tensors(tensors, _known_name)
    for layer in range(layout.layer_count(config)):
        names = [f"encoder.layers.{layer}.{part}.weight" for part in PARTS]
        parts = [result[name] for name in names if name in result]
        fused = f"encoder.layers.{layer}.attn.Wqkv.weight"
        if len({part.shape for part in parts}) == 1 and len(parts) == 3 and fused not in result:
            for name in names:
                del result[name]
            result[fused] = tensor_views.concatenate(fused, parts)
    return result


def _known_name(name: str) -> str | None:
    """Return the name of a tensor in the gguf package's tables, or None for a tensor of a head for
    training.
    """
    known = PREFIX.sub("", name)
    if known.startswith(bert.UNUSED_PARTS):
        return None
    if match := LAYER_NAME.fullmatch(known):
        part = OLD_NAMES.get(match[2], match[2])
        known = f"encoder.layers.{match[1]}.{part}.{match[3]}"
    return known.replace("embeddings.LayerNorm.", "emb_ln.")


NOMIC_BERT = Arch(
    name="nomic-bert",
    kind="NOMIC_BERT",
    hf=("NomicBertModel",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
    normalize=normalize,
    dropped_endings=("embeddings.position_ids", "embeddings.token_type_ids", "inv_freq"),
)

ARCHS = (NOMIC_BERT,)
