"""DeepSeek V2 and V3: attention with compressed keys and values (MLA), a few dense layers, then
layers with routed and shared experts.

Follows conversion/deepseek.py and src/models/deepseek2.cpp of llama.cpp. llama.cpp's KV cache
contains the compressed keys. Therefore the matrix kv_b, which decompresses keys and values, is
split in two: attn_k_b, which is transposed, is applied to the queries, and attn_v_b computes the
values. The layer of V3 that predicts a further token is converted, which llama.cpp's own converter
leaves out, although its graph has it.
"""

from dataclasses import dataclass, replace
from typing import Any

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.parts import (
    block_tensors,
    checks,
    experts,
    layout,
    metadata,
    prediction,
    rope,
    routers,
)
from quant.convert.parts.base import Arch, ArchKey, Shapes, TensorOp

# The two norms inside the attention have this eps in transformers, whatever config.json says.
INNER_NORM_EPS = 1e-6
ATTN_FACTOR_KEY = "rope.scaling.attn_factor"


@dataclass(frozen=True, slots=True)
class MlaWidths:
    """Widths of the compressed attention (MLA), in values.

    `query_rank` is the width of compressed queries, 0 if queries are not compressed. `kv_rank` is
    the width of compressed keys and values. The head of a key has `plain_width` values without
    rotary positions, then `rope_width` values with rotary positions.
    """

    heads: int
    query_rank: int
    kv_rank: int
    plain_width: int
    rope_width: int
    value_width: int

    @property
    def key_width(self) -> int:
        """The width of a key's head."""
        return self.plain_width + self.rope_width


def mla_widths(config: CheckpointConfig) -> MlaWidths:
    """Return the widths of the compressed attention that config.json describes."""
    query = config.get_int("q_lora_rank") if config.values.get("q_lora_rank") is not None else 0
    return MlaWidths(
        config.get_int("num_attention_heads"),
        query,
        config.get_int("kv_lora_rank"),
        config.get_int("qk_nope_head_dim"),
        config.get_int("qk_rope_head_dim"),
        config.get_int("v_head_dim"),
    )


def check_v2(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp computes differently for DeepSeek V2; return
    notes for the user.
    """
    method = config.values.get("topk_method")
    checks.raise_problems(
        config,
        [
            *_problems(config, "softmax"),
            (method not in ("greedy", "group_limited_greedy"), f"its topk_method is {method}"),
            (
                routers.expert_groups(config) != (1, 1),
                "it scores groups of experts by their best one, llama.cpp by their best two",
            ),
            (config.get_bool("norm_topk_prob"), "norm_topk_prob is true"),
            checks.problem_biases(config, "mlp_bias"),
        ],
    )
    return _notes(config)


def check_v3(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp computes differently for DeepSeek V3; return
    notes for the user.
    """
    method = config.values.get("topk_method", "noaux_tc")
    checks.raise_problems(
        config,
        [*_problems(config, "sigmoid"), (method != "noaux_tc", f"its topk_method is {method}")],
    )
    return _notes(config)


def _problems(config: CheckpointConfig, scoring: str) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) that are the same for V2 and V3. `scoring` is the
    scoring_func that the version must have.
    """
    sizes, layers = mla_widths(config), layout.layer_count(config)
    lite = layers in (26, 27) or (layers == 48 and config.get_int("vocab_size") == 128256)
    settings = rope.rope_settings(config)
    config.get_int("n_shared_experts")
    unscaled_yarn = settings.values["rope_type"] == "yarn" and settings.get_float("factor") <= 1
    return [
        *checks.common_problems(_rotary_part(config), rope_types=("default", "yarn")),
        *routers.router_problems(config, scoring),
        (unscaled_yarn, "its yarn has a factor of 1 or less"),
        (
            config.get_int("num_key_value_heads", default=sizes.heads) != sizes.heads,
            "its query heads share keys and values",
        ),
        checks.problem_biases(config, "attention_bias"),
        (
            lite and sizes.query_rank,
            f"llama.cpp expects no q_lora_rank in a model of {layers} layers",
        ),
    ]


def _notes(config: CheckpointConfig) -> list[str]:
    """Return a note about norms that llama.cpp computes with a different eps."""
    return checks.eps_notes(config, "compressed queries and keys", INNER_NORM_EPS)


def _rotary_part(config: CheckpointConfig, **changes: Any) -> CheckpointConfig:
    """Return the config with `changes`, and with `head_dim` set to the width of the rotary part of
    a head unless `changes` sets it. The functions in parts/ need this, because they assume that
    a whole head is rotary.
    """
    return replace(
        config, values={**config.values, "head_dim": mla_widths(config).rope_width, **changes}
    )


def keys(config: CheckpointConfig, gating: int) -> list[ArchKey]:
    """Return the common metadata keys, then the keys of the attention's widths and of the experts.
    `gating` is llama.cpp's number of the function that scores the experts.

    The common keys are those of a model with one key-value head, because in llama.cpp all heads
    share the compressed keys.
    """
    sizes = mla_widths(config)
    rotary = _rotary_part(config, num_key_value_heads=1, head_dim=None)
    return [
        *_with_yarn_factors(config, metadata.common_keys(rotary)),
        ArchKey("attention.q_lora_rank", "uint32", sizes.query_rank),
        ArchKey("attention.kv_lora_rank", "uint32", sizes.kv_rank),
        ArchKey("attention.key_length", "uint32", sizes.kv_rank + sizes.rope_width),
        ArchKey("attention.value_length", "uint32", sizes.kv_rank),
        ArchKey("attention.key_length_mla", "uint32", sizes.key_width),
        ArchKey("attention.value_length_mla", "uint32", sizes.value_width),
        ArchKey("rope.dimension_count", "uint32", sizes.rope_width),
        *routers.router_keys(config, gating),
    ]


def _with_yarn_factors(config: CheckpointConfig, keys: list[ArchKey]) -> list[ArchKey]:
    """Return the metadata keys with yarn's factors changed, so that llama.cpp's deepseek2 computes
    what transformers computes.

    transformers multiplies rotated values by `rotated_factor`, and scores by the square of
    `score_factor`. Let m(w) be 1 + w ln(factor) / 10. llama.cpp multiplies rotated values by
    attn_factor, and all scores by the square of attn_factor * m(w), where w is ten times the key
    yarn_log_multiplier. llama.cpp reads w = 0 as "not set" and then multiplies attn_factor by m(1)
    (llama_context; graph of deepseek2.cpp). The keys that _yarn() in rope.py wrote are right for
    that case.
    """
    settings = rope.rope_settings(config)
    if settings.values["rope_type"] != "yarn":
        return keys
    rotated_factor = rope.yarn_attention_factor(settings)
    score_factor = (
        rope.yarn_scale(settings, settings.get_float("mscale_all_dim"))
        if settings.values.get("mscale_all_dim")
        else 1.0
    )
    weight = (score_factor / rotated_factor - 1) / (rope.yarn_scale(settings) - 1)
    if abs(weight) < 1e-6:
        return keys
    return [
        *(
            replace(key, value=rotated_factor) if key.name == ATTN_FACTOR_KEY else key
            for key in keys
        ),
        ArchKey("rope.scaling.yarn_log_multiplier", "float32", 0.1 * weight),
    ]


def required_shapes(config: CheckpointConfig, has_expert_bias: bool) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by GGUF name.

    With `has_expert_bias`, each router has a bias, as in V3.
    """
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.repeat_for_blocks(config, _attention(config))
        | routers.feed_forward_shapes(config, has_expert_bias)
    )


def prediction_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of the tensors of V3's layer that predicts a further token, by role."""
    return (
        prediction.input_shapes(config)
        | _attention(config)
        | routers.expert_feed_forward_shapes(config, has_expert_bias=True)
    )


def _attention(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's attention, of the norms inside it and of the norm before it,
    by role.
    """
    hidden, sizes = config.get_int("hidden_size"), mla_widths(config)
    query_width = sizes.heads * sizes.key_width
    queries: Shapes = {"attn_q.weight": (query_width, hidden)}
    if sizes.query_rank:
        queries = {
            "attn_q_a.weight": (sizes.query_rank, hidden),
            "attn_q_a_norm.weight": (sizes.query_rank,),
            "attn_q_b.weight": (query_width, sizes.query_rank),
        }
    return queries | {
        "attn_norm.weight": (hidden,),
        "attn_kv_a_norm.weight": (sizes.kv_rank,),
        "attn_kv_a_mqa.weight": (sizes.kv_rank + sizes.rope_width, hidden),
        "attn_k_b.weight": (sizes.heads, sizes.kv_rank, sizes.plain_width),
        "attn_v_b.weight": (sizes.heads, sizes.value_width, sizes.kv_rank),
        "attn_output.weight": (hidden, sizes.heads * sizes.value_width),
    }


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked, kv_b split and the router's bias renamed."""
    result: Tensors = {}
    for name, tensor in experts.stack_experts_and_name_biases(config, tensors).items():
        if name.endswith(".kv_b_proj.weight"):
            result |= _split_kv_b(config, name, tensor)
        else:
            result[name] = tensor
    return result


def _split_kv_b(config: CheckpointConfig, name: str, tensor: LazyTensor) -> Tensors:
    """Split kv_b [heads * (plain + value), compressed] into its key part, transposed, and its value
    part.

    A kv_b of any other shape is not split. It is renamed to a name that contains its shape, so that
    the error about unknown tensors shows the shape.
    """
    sizes = mla_widths(config)
    height = sizes.plain_width + sizes.value_width
    if tensor.shape != (sizes.heads * height, sizes.kv_rank):
        label = f"{tensor.name} {list(tensor.shape)}"
        return {label: replace(tensor, name=label)}
    matrices = tensor_views.reshape(tensor, sizes.heads, height, sizes.kv_rank)
    return {
        name.replace("kv_b_proj", "k_b_proj"): tensor_views.transpose(
            tensor_views.pick_range(matrices, 0, sizes.plain_width)
        ),
        name.replace("kv_b_proj", "v_b_proj"): tensor_views.pick_range(
            matrices, sizes.plain_width, height
        ),
    }


def _interleave_rotary(
    config: CheckpointConfig, tensor: LazyTensor, heads: int, plain: int
) -> LazyTensor:
    """Reorder the rotary rows of each head, which follow its `plain` rows, into interleaved pairs.

    Checkpoints with rope_interleave, which is usual, store interleaved pairs already. Their tensors
    stay unchanged.
    """
    rope_width = mla_widths(config).rope_width
    if config.get_bool("rope_interleave", default=True):
        return tensor
    order = [*range(plain), *(plain + row for row in rope.rope_row_order(1, rope_width))]
    return tensor_views.pick_rows(
        tensor, [head * (plain + rope_width) + row for head in range(heads) for row in order]
    )


def _interleave_queries(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    return _interleave_rotary(
        config, tensor, mla_widths(config).heads, mla_widths(config).plain_width
    )


def _interleave_keys(config: CheckpointConfig, tensor: LazyTensor) -> LazyTensor:
    return _interleave_rotary(config, tensor, 1, mla_widths(config).kv_rank)


TENSOR_OPS: dict[str, TensorOp] = {
    "attn_q": _interleave_queries,
    "attn_q_b": _interleave_queries,
    "attn_kv_a_mqa": _interleave_keys,
}

V2 = Arch(
    name="deepseek2",
    kind="DEEPSEEK2",
    hf=("DeepseekV2ForCausalLM",),
    keys=lambda config: keys(config, experts.SOFTMAX),
    required_shapes=lambda config: required_shapes(config, has_expert_bias=False),
    check=check_v2,
    defaults={"topk_method": "greedy", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    prepare=prepare,
)
V3 = replace(
    V2,
    hf=("DeepseekV3ForCausalLM",),
    keys=lambda config: keys(config, experts.SIGMOID),
    required_shapes=lambda config: required_shapes(config, has_expert_bias=True),
    check=check_v3,
    defaults={
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    prediction_shapes=prediction_shapes,
    ops=TENSOR_OPS,
)

ARCHS = (V2, V3)
