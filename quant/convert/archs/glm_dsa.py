"""GLM 5: the attention and experts of DeepSeek V3, and an indexer that selects the positions to
which a token attends. Layers without an indexer attend to the positions that the last indexer
selected.

Follows GlmMoeDsaModel of llama.cpp (conversion/glm.py, src/models/glm-dsa.cpp). The kinds of the
layers are always written, because llama.cpp guesses them from the context length otherwise.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import deepseek2
from quant.convert.archs.glm4_moe_lite import problem_mlp_types, read_mlp_types
from quant.convert.parts import block_tensors, checks, layout, rope
from quant.convert.parts.base import ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' GlmMoeDsaConfig
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
}
LAYER_KINDS = {"full": True, "F": True, "shared": False, "S": False}


def indexer_layers(config: CheckpointConfig) -> list[bool]:
    """Return a list with one entry for each layer: whether the layer has an indexer.

    They are in indexer_types or index_topk_pattern, or follow from index_topk_freq and
    index_skip_topk_offset. The list has another length if the config has kinds that are unknown.
    """
    kinds = config.values.get("indexer_types") or config.values.get("index_topk_pattern")
    if kinds is not None:
        entries = list(kinds) if isinstance(kinds, str | list) else []
        return [LAYER_KINDS[kind] for kind in entries if kind in list(LAYER_KINDS)]
    period = config.get_int("index_topk_freq", default=1)
    offset = config.get_int("index_skip_topk_offset", default=2)
    return [max(layer - offset + 1, 0) % period == 0 for layer in range(layout.layer_count(config))]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's glm-dsa computes differently; return notes for
    the user.
    """
    layers = indexer_layers(config)
    checks.raise_problems(
        config,
        [
            *indexer_problems(config),
            (
                len(layers) != layout.layer_count(config) or not layers[0],
                "its indexer_types are not one kind for each layer, the first one full",
            ),
            (
                rope.rope_settings(config).values["rope_type"] != "default",
                "its rotary positions are scaled",
            ),
        ],
    )
    return deepseek2.check_v3(config)


def indexer_problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp does not support in families
    with indexers.
    """
    width, sizes = config.get_int("index_head_dim"), deepseek2.mla_widths(config)
    return [
        problem_mlp_types(config),
        (not sizes.query_rank, "its queries are not compressed"),
        (
            width < sizes.rope_width or width & (width - 1),
            f"the heads of its indexer have {width} values",
        ),
    ]


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return DeepSeek V3's metadata keys, then those of the indexer."""
    return [
        *deepseek2.V3.keys(config),
        *indexer_keys(config),
        ArchKey("attention.indexer.types", "array:bool", indexer_layers(config)),
    ]


def indexer_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of an indexer."""
    return [
        ArchKey("attention.indexer.head_count", "uint32", config.get_int("index_n_heads")),
        ArchKey("attention.indexer.key_length", "uint32", config.get_int("index_head_dim")),
        ArchKey("attention.indexer.top_k", "uint32", config.get_int("index_topk")),
    ]


def indexer_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's indexer, by role."""
    hidden, rank = config.get_int("hidden_size"), deepseek2.mla_widths(config).query_rank
    heads, width = config.get_int("index_n_heads"), config.get_int("index_head_dim")
    return {
        "indexer.k_norm.weight": (width,),
        "indexer.k_norm.bias": (width,),
        "indexer.proj.weight": (heads, hidden),
        "indexer.attn_k.weight": (width, hidden),
        "indexer.attn_q_b.weight": (heads * width, rank),
    }


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    layers, indexer = indexer_layers(config), indexer_shapes(config)
    return deepseek2.V3.required_shapes(config) | block_tensors.shapes_by_block(
        len(layers), lambda layer: indexer if layers[layer] else {}
    )


def prediction_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors of the layer that predicts a further token, by role."""
    return deepseek2.prediction_shapes(config) | indexer_shapes(config)


GLM_DSA = replace(
    deepseek2.V3,
    name="glm-dsa",
    kind="GLM_DSA",
    hf=("GlmMoeDsaForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    normalize=read_mlp_types,
    prediction_shapes=prediction_shapes,
    ops={},
)

ARCHS = (GLM_DSA,)
