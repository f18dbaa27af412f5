"""DeepSeek V2 and V3: compressed keys and values (MLA), a few dense layers, then routed and shared
experts.

Follows conversion/deepseek.py and src/models/deepseek2.cpp of llama.cpp. Keys stay compressed in
its cache, so kv_b is split into attn_k_b, which is transposed and applied to queries, and attn_v_b,
which makes values.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import Config
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.archs import blocks, experts
from quant.convert.archs.base import Arch, Key, Op, Shapes, rope_rows

SOFTMAX, SIGMOID = 1, 2  # llama_expert_gating_func_type
EPS = 1e-6  # of the two norms inside the attention; transformers ignores the config here
ATTN_FACTOR = "rope.scaling.attn_factor"


@dataclass(frozen=True, slots=True)
class Mla:
    """Widths of the compressed attention, in values.

    `query_rank` is the rank of compressed queries, 0 if they are not compressed; `kv_rank` is that
    of keys and values. A key's head has `plain_width` values without and `rope_width` values with a
    rotary position.
    """

    heads: int
    query: int
    compressed: int
    plain: int
    turned: int
    value: int

    @property
    def key(self) -> int:
        """Return the width of a key's head."""
        return self.plain + self.turned


def mla(config: Config) -> Mla:
    """Return the widths that config.json describes."""
    query = config.number("q_lora_rank") if config.values.get("q_lora_rank") is not None else 0
    return Mla(
        config.number("num_attention_heads"),
        query,
        config.number("kv_lora_rank"),
        config.number("qk_nope_head_dim"),
        config.number("qk_rope_head_dim"),
        config.number("v_head_dim"),
    )


def dense(config: Config) -> int:
    """Return the number of layers without experts; they come first."""
    first = (
        config.number("first_k_dense_replace") if config.values.get("first_k_dense_replace") else 0
    )
    return min(first, blocks.layers(config))


def groups(config: Config) -> tuple[int, int]:
    """Return the number of expert groups and how many of them a token may use; (1, 1) if groups do
    not restrict the choice.
    """
    count, used = config.number("n_group", default=1), config.number("topk_group", default=1)
    return (
        (1, 1) if config.values.get("topk_method") == "greedy" or used >= count else (count, used)
    )


def ahead(config: Config) -> int:
    """Return the number of extra layers that predict further tokens (MTP), which follow the last
    layer.
    """
    return (
        config.number("num_nextn_predict_layers")
        if config.values.get("num_nextn_predict_layers")
        else 0
    )


def check_v2(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp computes differently for DeepSeek V2; return
    notes for the user.
    """
    method = config.values.get("topk_method")
    blocks.refuse(
        config,
        [
            *_problems(config, "softmax"),
            (method not in ("greedy", "group_limited_greedy"), f"its topk_method is {method}"),
            (
                groups(config) != (1, 1),
                "it scores groups of experts by their best one, llama.cpp by their best two",
            ),
            (config.flag("norm_topk_prob"), "norm_topk_prob is true"),
            (config.flag("mlp_bias"), "its feed-forward has biases (mlp_bias)"),
        ],
    )
    return _notes(config)


def check_v3(config: Config) -> list[str]:
    """Raise UserError for settings that llama.cpp computes differently for DeepSeek V3; return
    notes for the user.
    """
    method = config.values.get("topk_method", "noaux_tc")
    blocks.refuse(
        config,
        [*_problems(config, "sigmoid"), (method != "noaux_tc", f"its topk_method is {method}")],
    )
    return _notes(config)


def _problems(config: Config, scoring: str) -> list[tuple[object, str]]:
    """Return the problems that V2 and V3 share. `scoring` is the version's scoring_func."""
    sizes, layers, count = mla(config), blocks.layers(config), experts.count(config)
    (split, chosen), values = groups(config), config.values
    lite = layers in (26, 27) or (layers == 48 and config.number("vocab_size") == 128256)
    settings = blocks.rope(config)
    config.number("n_shared_experts")
    flat = settings.values["rope_type"] == "yarn" and settings.real("factor") <= 1
    return [
        *blocks.problems(_rotary_part(config), ropes=("default", "yarn")),
        *experts.problems(config),
        (flat, "its yarn has a factor of 1 or less"),
        (
            config.number("num_key_value_heads", default=sizes.heads) != sizes.heads,
            "its query heads share keys and values",
        ),
        (config.flag("attention_bias"), "its attention has biases (attention_bias)"),
        (lite and sizes.query, f"llama.cpp expects no q_lora_rank in a model of {layers} layers"),
        (
            values.get("moe_layer_freq") not in (None, 1),
            f"its moe_layer_freq is {values.get('moe_layer_freq')}",
        ),
        (
            values.get("scoring_func", scoring) != scoring,
            f"its scoring_func is {values.get('scoring_func')}",
        ),
        (count < 2, "it has only one expert"),
        (count % split or split >= count, f"{count} experts cannot be split into {split} groups"),
        (
            experts.used(config) > count // split * chosen,
            f"it uses more experts than {chosen} groups have",
        ),
    ]


def _notes(config: Config) -> list[str]:
    eps, notes = config.real("rms_norm_eps", EPS), []
    if ahead(config):
        notes.append(
            f"layers from {blocks.layers(config)} on predict further tokens (MTP) and are "
            "not converted"
        )
    if eps != EPS:
        notes.append(
            f"the norms of compressed queries and keys have eps {EPS:g} in transformers and "
            f"{eps:g} in llama.cpp"
        )
    return notes


def _rotary_part(config: Config, **changes: Any) -> Config:
    """Return the config of a model whose heads consist of their rotary part only."""
    return replace(config, values={**config.values, "head_dim": mla(config).turned, **changes})


def keys(config: Config, gating: int) -> list[Key]:
    """Return the common keys of a model with one key-value head, the attention's widths, and the
    experts' keys. `gating` is llama.cpp's number of the scoring function.
    """
    sizes, (split, chosen) = mla(config), groups(config)
    rotary = _rotary_part(config, num_key_value_heads=1, head_dim=None)
    return [
        *_with_yarn_factors(config, blocks.keys(rotary)),
        Key("attention.q_lora_rank", "uint32", sizes.query),
        Key("attention.kv_lora_rank", "uint32", sizes.compressed),
        Key("attention.key_length", "uint32", sizes.compressed + sizes.turned),
        Key("attention.value_length", "uint32", sizes.compressed),
        Key("attention.key_length_mla", "uint32", sizes.key),
        Key("attention.value_length_mla", "uint32", sizes.value),
        Key("rope.dimension_count", "uint32", sizes.turned),
        Key("leading_dense_block_count", "uint32", dense(config)),
        *experts.keys(config),
        Key("expert_feed_forward_length", "uint32", config.number("moe_intermediate_size")),
        Key("expert_shared_count", "uint32", config.number("n_shared_experts")),
        Key("expert_weights_scale", "float32", config.real("routed_scaling_factor")),
        Key("expert_weights_norm", "bool", config.flag("norm_topk_prob")),
        Key("expert_gating_func", "uint32", gating),
        Key("expert_group_count", "uint32", split),
        Key("expert_group_used_count", "uint32", chosen),
    ]


def _with_yarn_factors(config: Config, keys: list[Key]) -> list[Key]:
    """Return the keys with yarn's factors as llama.cpp's deepseek2 reads them.

    With m(w) = 1 + w ln(factor) / 10, llama.cpp multiplies rotated values by `attn_factor` and all
    scores by (`attn_factor` m(w)) squared, where w is ten times yarn_log_multiplier. It reads w = 0
    as "not set" and then multiplies `attn_factor` by m(1) (llama_context; graph of deepseek2.cpp).
    transformers multiplies rotated values by `rotated_factor` and scores by `score_factor` squared.
    """
    settings = blocks.rope(config)
    if settings.values["rope_type"] != "yarn":
        return keys
    rotated_factor = blocks.loudness(settings)
    score_factor = (
        blocks.stretch(settings, settings.real("mscale_all_dim"))
        if settings.values.get("mscale_all_dim")
        else 1.0
    )
    weight = (score_factor / rotated_factor - 1) / (blocks.stretch(settings) - 1)
    if abs(weight) < 1e-6:
        return keys
    return [
        *(replace(key, value=rotated_factor) if key.name == ATTN_FACTOR else key for key in keys),
        Key("rope.scaling.yarn_log_multiplier", "float32", 0.1 * weight),
    ]


def expected(config: Config, biased: bool) -> Shapes:
    """Return the required tensors with their shapes, rows first.

    With `has_expert_bias` (V3), the router has a bias.
    """
    hidden, shared = config.number("hidden_size"), config.number("n_shared_experts")
    width, first = config.number("moe_intermediate_size"), dense(config)
    sparse: Shapes = {
        "ffn_norm.weight": (hidden,),
        **experts.shapes(config, width),
        "ffn_gate_shexp.weight": (shared * width, hidden),
        "ffn_up_shexp.weight": (shared * width, hidden),
        "ffn_down_shexp.weight": (hidden, shared * width),
    }
    if biased:
        sparse["exp_probs_b.bias"] = (experts.count(config),)
    dense_shapes = blocks.gated(config)
    forward = {
        f"blk.{layer}.{role}": shape
        for layer in range(blocks.layers(config))
        for role, shape in (dense_shapes if layer < first else sparse).items()
    }
    return blocks.ends(config) | blocks.blocks(config, _attention(config)) | forward


def _attention(config: Config) -> Shapes:
    """Return the shapes of one block's attention with its inner norms and the norm before it, by
    role.
    """
    hidden, sizes = config.number("hidden_size"), mla(config)
    wide = sizes.heads * sizes.key
    queries: Shapes = {"attn_q.weight": (wide, hidden)}
    if sizes.query:
        queries = {
            "attn_q_a.weight": (sizes.query, hidden),
            "attn_q_a_norm.weight": (sizes.query,),
            "attn_q_b.weight": (wide, sizes.query),
        }
    return queries | {
        "attn_norm.weight": (hidden,),
        "attn_kv_a_norm.weight": (sizes.compressed,),
        "attn_kv_a_mqa.weight": (sizes.compressed + sizes.turned, hidden),
        "attn_k_b.weight": (sizes.heads, sizes.compressed, sizes.plain),
        "attn_v_b.weight": (sizes.heads, sizes.value, sizes.compressed),
        "attn_output.weight": (hidden, sizes.heads * sizes.value),
    }


def prepare(config: Config, tensors: Tensors) -> Tensors:
    """Stack experts, split kv_b, rename the router's bias, and drop the MTP layers."""
    result: Tensors = {}
    mtp_layers = range(blocks.layers(config), blocks.layers(config) + ahead(config))
    for name, tensor in experts.gather(config, tensors).items():
        match = re.match(r"(?:model\.)?layers\.(\d{1,4})\.", name)
        if match and int(match[1]) in mtp_layers:
            continue
        if name.endswith(".kv_b_proj.weight"):
            result |= _split(config, name, tensor)
        else:
            result[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return result


def _split(config: Config, name: str, tensor: LazyTensor) -> Tensors:
    """Split kv_b [heads * (plain + value), compressed] into its key and value parts.

    A tensor of another shape gets a name that shows the shape, so that the error lists it as
    unknown.
    """
    sizes = mla(config)
    height = sizes.plain + sizes.value
    if tensor.shape != (sizes.heads * height, sizes.compressed):
        label = f"{tensor.name} {list(tensor.shape)}"
        return {label: replace(tensor, name=label)}
    matrices = tensor_views.reshaped(tensor, sizes.heads, height, sizes.compressed)
    return {
        name.replace("kv_b_proj", "k_b_proj"): tensor_views.transposed(
            tensor_views.part(matrices, 0, sizes.plain)
        ),
        name.replace("kv_b_proj", "v_b_proj"): tensor_views.part(matrices, sizes.plain, height),
    }


def _interleave_rotary(config: Config, tensor: LazyTensor, heads: int, plain: int) -> LazyTensor:
    """Reorder the rotary rows that follow each head's `plain` rows into interleaved pairs.

    Most checkpoints store pairs already (rope_interleave).
    """
    turned = mla(config).turned
    if config.flag("rope_interleave", default=True):
        return tensor
    order = [*range(plain), *(plain + row for row in rope_rows(1, turned))]
    return tensor_views.pick(
        tensor, [head * (plain + turned) + row for head in range(heads) for row in order]
    )


def _interleave_queries(config: Config, tensor: LazyTensor) -> LazyTensor:
    return _interleave_rotary(config, tensor, mla(config).heads, mla(config).plain)


def _interleave_keys(config: Config, tensor: LazyTensor) -> LazyTensor:
    return _interleave_rotary(config, tensor, 1, mla(config).compressed)


OPS: dict[str, Op] = {
    "attn_q": _interleave_queries,
    "attn_q_b": _interleave_queries,
    "attn_kv_a_mqa": _interleave_keys,
}

V2 = Arch(
    name="deepseek2",
    kind="DEEPSEEK2",
    hf=("DeepseekV2ForCausalLM",),
    keys=lambda config: keys(config, SOFTMAX),
    expected=lambda config: expected(config, biased=False),
    check=check_v2,
    defaults={"topk_method": "greedy", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    prepare=prepare,
)
V3 = replace(
    V2,
    hf=("DeepseekV3ForCausalLM",),
    keys=lambda config: keys(config, SIGMOID),
    expected=lambda config: expected(config, biased=True),
    check=check_v3,
    defaults={
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    ops=OPS,
)

ARCHS = (V2, V3)
