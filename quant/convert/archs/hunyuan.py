"""Hunyuan, dense and with experts: Llama with a norm of each query head and each key head after the
rotation. With a rope type "dynamic" and a setting `alpha`, the rotary base is larger.

Follows HunYuanModel and HunYuanMoEModel of llama.cpp (conversion/hunyuan.py,
src/models/hunyuan-vl.cpp and hunyuan-moe.cpp). The converter of llama.cpp writes a context length
of 262144 for such a base; here it is the one of config.json.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.parts import block_tensors, checks, experts, layout, metadata, rope
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {"rms_norm_eps": 1e-5}
# Settings that released models list for each layer, although all layers are equal.
LAYER_SETTINGS = ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert")


def rope_base(config: CheckpointConfig) -> float:
    """Return the rotary base. With `alpha`, it is rope_theta * alpha ** (d / (d - 2)) for heads of
    d values. Raises UserError if it is not a finite number.
    """
    settings, head_dim = rope.rope_settings(config), layout.head_counts(config)[2]
    base = settings.get_float("rope_theta")
    if settings.values["rope_type"] == "dynamic" and head_dim > 2:
        factor = min(settings.get_float("alpha"), 1e9) ** (head_dim / (head_dim - 2))
        return CheckpointConfig({"rope_theta": base * factor}, config.location).get_float(
            "rope_theta"
        )
    return base


def problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp computes differently for
    Hunyuan.
    """
    settings, head_dim = rope.rope_settings(config).values, layout.head_counts(config)[2]
    return [
        *checks.common_problems(config, rope_types=(*rope.ROPE_TYPES, "dynamic")),
        checks.problem_biases(config, "attention_bias"),
        (
            settings["rope_type"] == "dynamic" and (not settings.get("alpha") or head_dim <= 2),
            "its rope type is dynamic without alpha",
        ),
    ]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's hunyuan-dense computes differently. Return
    no notes.
    """
    several = isinstance(count := config.values.get("num_experts"), int) and count > 1
    checks.raise_problems(config, [*problems(config), (several, "it is a mixture of experts")])
    return []


def check_moe(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's hunyuan-moe computes differently. Return
    no notes.
    """
    values, single = config.values, single_settings(config)
    different = [
        name
        for name in LAYER_SETTINGS
        if isinstance(item := values.get(name), list) and any(other != item[0] for other in item)
    ]
    checks.raise_problems(
        config,
        [
            (different, f"its layers differ in {' and '.join(different)}"),
        ],
    )
    checks.raise_problems(
        config,
        [
            *problems(config),
            *experts.expert_problems(single),
            (
                single.values.get("num_shared_expert") not in (None, 1),
                "it does not have one shared expert",
            ),
            (
                single.values.get("moe_intermediate_size")
                not in (None, config.get_int("intermediate_size")),
                "its moe_intermediate_size differs from intermediate_size",
            ),
        ],
    )
    return []


def single_settings(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with one number instead of a list for the settings in LAYER_SETTINGS, and
    with the number of used experts under the name that other families use.
    """
    values = dict(config.values)
    for name in LAYER_SETTINGS:
        if isinstance(item := values.get(name), list) and item:
            values[name] = item[0]
    values["num_experts_per_tok"] = values.get("moe_topk")
    return replace(config, values=values)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, with the rotary base changed by `alpha`."""
    base = ArchKey("rope.freq_base", "float32", rope_base(config))
    return [base if key.name == base.name else key for key in metadata.common_keys(config)]


def moe_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of the dense models, then those of the experts."""
    width = config.get_int("intermediate_size")
    return [
        *keys(config),
        *experts.expert_keys(single_settings(config)),
        ArchKey("expert_shared_count", "uint32", 1),
        ArchKey("expert_feed_forward_length", "uint32", width),
        ArchKey("expert_shared_feed_forward_length", "uint32", width),
    ]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted dense model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        block_tensors.head_norm_shapes(config),
        block_tensors.feed_forward_shapes(config),
    )


def moe_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model with experts must have, rows first,
    by GGUF name.
    """
    width = config.get_int("intermediate_size")
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config,
        block_tensors.attention_shapes(config),
        block_tensors.head_norm_shapes(config),
        experts.sparse_feed_forward_shapes(single_settings(config), width),
        experts.shared_expert_shapes(config, width),
    )


HUNYUAN = Arch(
    name="hunyuan-dense",
    kind="HUNYUAN_DENSE",
    hf=("HunYuanDenseV1ForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
)
HUNYUAN_MOE = Arch(
    name="hunyuan-moe",
    kind="HUNYUAN_MOE",
    hf=("HunYuanMoEV1ForCausalLM",),
    keys=moe_keys,
    required_shapes=moe_shapes,
    check=check_moe,
    prepare=lambda config, tensors: experts.stack_experts(single_settings(config), tensors),
    defaults=DEFAULTS | {"num_experts": 1, "moe_topk": 1},
)

ARCHS = (HUNYUAN, HUNYUAN_MOE)
