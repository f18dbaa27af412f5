"""DeepSeek V2 and V3: compressed keys and values (MLA), a few dense layers, then routed and shared
experts.

Follows conversion/deepseek.py and src/models/deepseek2.cpp of llama.cpp: keys stay compressed in
its cache, so kv_b is split into a part that queries pass (attn_k_b, exchanged rows and columns) and
one that makes values.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from quant import views
from quant.archs import common, experts
from quant.archs.base import Arch, Config, Key, Op, Shapes, Tensors, rope_rows
from quant.tensors import LazyTensor

SOFTMAX, SIGMOID = 1, 2  # llama_expert_gating_func_type
EPS = 1e-6  # of the two norms inside the attention, whatever the config says
ATTN_FACTOR = "rope.scaling.attn_factor"


@dataclass(frozen=True, slots=True)
class Mla:
    """Sizes of the attention; `query` is the rank of compressed queries, 0 where they are not."""

    heads: int
    query: int
    compressed: int
    plain: int
    turned: int
    value: int

    @property
    def key(self) -> int:
        """Values of a key's head."""
        return self.plain + self.turned


def mla(config: Config) -> Mla:
    """The attention that config.json describes."""
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
    """Layers without experts, all before those with."""
    first = (
        config.number("first_k_dense_replace") if config.values.get("first_k_dense_replace") else 0
    )
    return min(first, common.layers(config))


def groups(config: Config) -> tuple[int, int]:
    """Groups of experts, and those that a token may choose from; one group where there is nothing
    to choose.
    """
    count, used = config.number("n_group", default=1), config.number("topk_group", default=1)
    return (
        (1, 1) if config.values.get("topk_method") == "greedy" or used >= count else (count, used)
    )


def ahead(config: Config) -> int:
    """Layers behind the last that guess further tokens."""
    return (
        config.number("num_nextn_predict_layers")
        if config.values.get("num_nextn_predict_layers")
        else 0
    )


def check_v2(config: Config) -> list[str]:
    """Refuse what llama.cpp would not compute alike for DeepSeek V2; returns what the user should
    know.
    """
    method = config.values.get("topk_method")
    common.refuse(
        config,
        [
            *_problems(config, "softmax"),
            (method not in ("greedy", "group_limited_greedy"), f"its topk_method is {method}"),
            (
                groups(config) != (1, 1),
                "it chooses groups of experts by their best one, llama.cpp by their best two",
            ),
            (config.flag("norm_topk_prob"), "norm_topk_prob is true"),
            (config.flag("mlp_bias"), "its feed-forward has biases (mlp_bias)"),
        ],
    )
    return _notes(config)


def check_v3(config: Config) -> list[str]:
    """Refuse what llama.cpp would not compute alike for DeepSeek V3; returns what the user should
    know.
    """
    method = config.values.get("topk_method", "noaux_tc")
    common.refuse(
        config,
        [*_problems(config, "sigmoid"), (method != "noaux_tc", f"its topk_method is {method}")],
    )
    return _notes(config)


def _problems(config: Config, scoring: str) -> list[tuple[object, str]]:
    """What neither can have."""
    sizes, layers, count = mla(config), common.layers(config), experts.count(config)
    (split, chosen), said = groups(config), config.values
    lite = layers in (26, 27) or (layers == 48 and config.number("vocab_size") == 128256)
    settings = common.rope(config)
    config.number("n_shared_experts")
    flat = settings.values["rope_type"] == "yarn" and settings.real("factor") <= 1
    return [
        *common.problems(_rotary(config), ropes=("default", "yarn")),
        *experts.problems(config),
        (flat, "its yarn does not stretch (factor)"),
        (
            config.number("num_key_value_heads", default=sizes.heads) != sizes.heads,
            "its heads share keys and values",
        ),
        (config.flag("attention_bias"), "its attention has biases (attention_bias)"),
        (lite and sizes.query, f"llama.cpp expects no q_lora_rank in a model of {layers} layers"),
        (
            said.get("moe_layer_freq") not in (None, 1),
            f"its moe_layer_freq is {said.get('moe_layer_freq')}",
        ),
        (
            said.get("scoring_func", scoring) != scoring,
            f"its scoring_func is {said.get('scoring_func')}",
        ),
        (count < 2, "it has one expert only"),
        (count % split or split >= count, f"{count} experts cannot be split into {split} groups"),
        (
            experts.used(config) > count // split * chosen,
            f"it uses more experts than {chosen} groups have",
        ),
    ]


def _notes(config: Config) -> list[str]:
    eps, found = config.real("rms_norm_eps", EPS), []
    if ahead(config):
        found.append(
            f"layers from {common.layers(config)} on, which guess further tokens (MTP), are not converted"
        )
    if eps != EPS:
        found.append(
            f"the norms of compressed queries and keys have eps {EPS:g} in transformers, {eps:g} in llama.cpp"
        )
    return found


def _rotary(config: Config, **changes: Any) -> Config:
    """The config as that of a model whose heads are their rotary part."""
    return replace(config, values={**config.values, "head_dim": mla(config).turned, **changes})


def keys(config: Config, gating: int) -> list[Key]:
    """The ordinary keys of a model with one key-value head, the attention's sizes, and the experts."""
    sizes, (split, chosen) = mla(config), groups(config)
    return [
        *_stretched(config, common.keys(_rotary(config, num_key_value_heads=1, head_dim=None))),
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


def _stretched(config: Config, keys: list[Key]) -> list[Key]:
    """The keys with yarn's two lengths as llama.cpp's deepseek2 understands them.

    With m(w) = 1 + w ln(factor) / 10 it takes rotated parts times `attn_factor` and all scores
    times (`attn_factor` m(w)) squared, w being ten times yarn_log_multiplier. w = 0 stands for "not
    said": then `attn_factor` is multiplied by m(1) (llama_context; graph of deepseek2.cpp).
    transformers takes rotated parts times `length`, and scores times `whole` squared.
    """
    settings = common.rope(config)
    if settings.values["rope_type"] != "yarn":
        return keys
    length = common.loudness(settings)
    whole = (
        common.stretch(settings, settings.real("mscale_all_dim"))
        if settings.values.get("mscale_all_dim")
        else 1.0
    )
    weight = (whole / length - 1) / (common.stretch(settings) - 1)
    if abs(weight) < 1e-6:
        return keys
    return [
        *(replace(key, value=length) if key.name == ATTN_FACTOR else key for key in keys),
        Key("rope.scaling.yarn_log_multiplier", "float32", 0.1 * weight),
    ]


def expected(config: Config, biased: bool) -> Shapes:
    """The tensors that must be there, with their shapes, rows first; `biased` choices of experts in
    V3.
    """
    hidden, shared = config.number("hidden_size"), config.number("n_shared_experts")
    width, first = config.number("moe_intermediate_size"), dense(config)
    mixed: Shapes = {
        "ffn_norm.weight": (hidden,),
        **experts.shapes(config, width),
        "ffn_gate_shexp.weight": (shared * width, hidden),
        "ffn_up_shexp.weight": (shared * width, hidden),
        "ffn_down_shexp.weight": (hidden, shared * width),
    }
    if biased:
        mixed["exp_probs_b.bias"] = (experts.count(config),)
    plain = common.gated(config)
    forward = {
        f"blk.{layer}.{role}": shape
        for layer in range(common.layers(config))
        for role, shape in (plain if layer < first else mixed).items()
    }
    return common.ends(config) | common.blocks(config, _attention(config)) | forward


def _attention(config: Config) -> Shapes:
    """One block's attention and the norms in it and before it, by role."""
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
    """Experts stacked, kv_b in two, the router's bias under the name of one; layers that guess
    ahead left out.
    """
    found: Tensors = {}
    behind = range(common.layers(config), common.layers(config) + ahead(config))
    for name, tensor in experts.gather(config, tensors).items():
        match = re.match(r"(?:model\.)?layers\.(\d{1,4})\.", name)
        if match and int(match[1]) in behind:
            continue
        if name.endswith(".kv_b_proj.weight"):
            found |= _split(config, name, tensor)
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return found


def _split(config: Config, name: str, tensor: LazyTensor) -> Tensors:
    """kv_b [heads * (plain + value), compressed] as its two parts; of another shape it is unknown,
    and that is told.
    """
    sizes = mla(config)
    height = sizes.plain + sizes.value
    if tensor.shape != (sizes.heads * height, sizes.compressed):
        told = f"{tensor.name} {list(tensor.shape)}"
        return {told: replace(tensor, name=told)}
    matrices = views.reshaped(tensor, sizes.heads, height, sizes.compressed)
    return {
        name.replace("kv_b_proj", "k_b_proj"): views.transposed(
            views.part(matrices, 0, sizes.plain)
        ),
        name.replace("kv_b_proj", "v_b_proj"): views.part(matrices, sizes.plain, height),
    }


def _turned(config: Config, tensor: LazyTensor, heads: int, plain: int) -> LazyTensor:
    """Rotary rows behind the `plain` ones of each head in pairs, as llama.cpp turns them; most are
    already.
    """
    turned = mla(config).turned
    if config.flag("rope_interleave", default=True):
        return tensor
    order = [*range(plain), *(plain + row for row in rope_rows(1, turned))]
    return views.pick(
        tensor, [head * (plain + turned) + row for head in range(heads) for row in order]
    )


def _queries(config: Config, tensor: LazyTensor) -> LazyTensor:
    return _turned(config, tensor, mla(config).heads, mla(config).plain)


OPS: dict[str, Op] = {
    "attn_q": _queries,
    "attn_q_b": _queries,
    "attn_kv_a_mqa": lambda config, tensor: _turned(config, tensor, 1, mla(config).compressed),
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
