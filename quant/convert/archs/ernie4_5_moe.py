"""ERNIE 4.5 with experts: interleaved rotary pairs, a few dense layers, then layers with routed
experts, which a softmax and a bias select, and with shared experts.

Follows Ernie4_5MoeModel of llama.cpp (conversion/ernie.py, src/models/ernie4-5-moe.cpp). The
converter of llama.cpp computes the width of the shared experts from other settings, which give the
same width for the released models. Layers that predict further tokens (MTP) are not converted.
"""

from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.parts import block_tensors, checks, experts, layout, metadata
from quant.convert.parts.base import Arch, ArchKey, Shapes

DEFAULTS = {  # defaults of transformers' Ernie4_5_MoeConfig
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}


def with_usual_names(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config with the numbers of experts under the names that other families use."""
    values = config.values
    names = {"num_experts": values["moe_num_experts"], "num_experts_per_tok": values["moe_k"]}
    return replace(config, values={**values, **names})


def dense_layer_count(config: CheckpointConfig) -> int:
    """Return the number of layers without experts. These are the first layers."""
    first = config.values["moe_layer_start_index"]
    count = config.get_int("moe_layer_start_index") if first != 0 else 0
    return min(count, layout.layer_count(config))


def shared_expert_width(config: CheckpointConfig) -> int:
    """Return the width of all shared experts together, 0 if there are none."""
    if config.values["moe_num_shared_experts"] == 0:
        return 0
    return config.get_int("moe_num_shared_experts") * config.get_int("moe_intermediate_size")


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's ernie4_5-moe computes differently; return notes
    for the user.
    """
    end = config.values.get("moe_layer_end_index")
    last = layout.layer_count(config) - 1
    checks.raise_problems(
        config,
        [
            *checks.common_problems(config),
            *experts.expert_problems(with_usual_names(config)),
            checks.problem_biases(config, "use_bias"),
            (
                config.get_int("moe_layer_interval", default=1) != 1,
                "moe_layer_interval leaves layers without experts",
            ),
            (
                end not in (None, -1) and (type(end) is not int or end < last),
                "layers after moe_layer_end_index have no experts",
            ),
        ],
    )
    if config.values.get("num_nextn_predict_layers"):
        return ["layers that predict further tokens (MTP) are not converted"]
    return []


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the experts."""
    entries = [
        *metadata.common_keys(config),
        *experts.expert_keys(with_usual_names(config)),
        ArchKey("interleave_moe_layer_step", "uint32", 1),
        ArchKey("leading_dense_block_count", "uint32", dense_layer_count(config)),
        ArchKey("expert_feed_forward_length", "uint32", config.get_int("moe_intermediate_size")),
    ]
    if width := shared_expert_width(config):
        entries += [
            ArchKey("expert_shared_count", "uint32", config.get_int("moe_num_shared_experts")),
            ArchKey("expert_shared_feed_forward_length", "uint32", width),
        ]
    return entries


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    named, width = with_usual_names(config), shared_expert_width(config)
    sparse: Shapes = {
        "exp_probs_b.bias": (experts.expert_count(named),),
        **experts.sparse_feed_forward_shapes(named, config.get_int("moe_intermediate_size")),
        **(experts.shared_expert_shapes(config, width) if width else {}),
    }
    dense, first = block_tensors.feed_forward_shapes(config), dense_layer_count(config)
    return (
        block_tensors.embedding_and_head(config)
        | block_tensors.repeat_for_blocks(config, block_tensors.attention_shapes(config))
        | block_tensors.shapes_by_block(
            layout.layer_count(config), lambda layer: dense if layer < first else sparse
        )
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked, and with the router's bias, which checkpoints store
    as a matrix of one row, as a vector. The MTP layers are left out.
    """
    result: Tensors = {}
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.mtp_")}
    for name, tensor in experts.stack_experts_and_name_biases(
        with_usual_names(config), kept
    ).items():
        if name.endswith(".e_score_correction.bias") and tensor.shape[:-1] == (1,):
            tensor = tensor_views.reshape(tensor, tensor.shape[-1])
        result[name.replace(".gate.moe_statics.", ".moe_statics.")] = tensor
    return result


ERNIE4_5_MOE = Arch(
    name="ernie4_5-moe",
    kind="ERNIE4_5_MOE",
    hf=("Ernie4_5_MoeForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    defaults=DEFAULTS,
    prepare=prepare,
)

ARCHS = (ERNIE4_5_MOE,)
