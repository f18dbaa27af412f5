"""Granite with experts: the multipliers of Granite, and gates and ups of all experts in one tensor.

Follows GraniteMoeModel of llama.cpp (conversion/granite.py, src/models/granite-moe.cpp). Granite 4
also has a shared expert, whose output is added.
"""

import re
from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.archs import granite
from quant.convert.parts import block_tensors, checks, experts, rope
from quant.convert.parts.base import ArchKey, Shapes, no_tensors

SHARED_NAME = re.compile(r"(.+\.shared_mlp\.)(input|output)_linear\.weight", re.DOTALL)
# Names of the first checkpoints -> names of transformers 5, which stack_experts() splits.
EXPERT_ENDINGS = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}
EXPERT_NAMES = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.gate": "ffn_gate_shexp",
    "shared_mlp.up": "ffn_up_shexp",
    "shared_mlp.down": "ffn_down_shexp",
}
SHARED_WIDTH_SETTING = "shared_intermediate_size"


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's granitemoe computes differently. Return no
    notes.
    """
    checks.raise_problems(config, expert_problems(config))
    return []


def expert_problems(config: CheckpointConfig) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp's granitemoe computes
    differently.
    """
    return [
        *checks.common_problems(config, rope_types=rope.ROPE_TYPES_WITH_FACTORS),
        *experts.expert_problems(config),
    ]


def shared_width(config: CheckpointConfig) -> int:
    """Return the width of the shared expert's feed-forward, 0 if there is no shared expert."""
    if config.values.get(SHARED_WIDTH_SETTING) in (None, 0):
        return 0
    return config.get_int(SHARED_WIDTH_SETTING)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return Granite's metadata keys, then those of the experts."""
    return [*granite.keys(config), *expert_keys(config)]


def expert_keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of the experts and of the shared expert."""
    shared = shared_width(config)
    return [
        *experts.expert_keys(config),
        *[ArchKey("expert_shared_feed_forward_length", "uint32", shared)] * bool(shared),
    ]


def expert_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of one block's norm, router, experts and shared expert, by role."""
    shapes = experts.sparse_feed_forward_shapes(config, config.get_int("intermediate_size"))
    if shared := shared_width(config):
        shapes |= experts.shared_expert_shapes(config, shared)
    return shapes


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return block_tensors.embedding_and_head(config) | block_tensors.repeat_for_blocks(
        config, block_tensors.attention_shapes(config), expert_shapes(config)
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with gates and ups in separate tensors, for experts and shared experts."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        ending = next((old for old in EXPERT_ENDINGS if name.endswith(old)), "")
        renamed = name.removesuffix(ending) + EXPERT_ENDINGS[ending] if ending else name
        pieces = _split_shared(renamed, tensor)
        result |= {name: tensor} if pieces.keys() & result.keys() else pieces
    return experts.stack_experts(config, result)


def _split_shared(name: str, tensor: LazyTensor) -> Tensors:
    """Split a shared expert's gates and ups [2 * ff, hidden] into two tensors. Other tensors keep
    their names.
    """
    match = SHARED_NAME.fullmatch(name)
    if match is None:
        return {name: tensor}
    if match[2] == "output":
        return {f"{match[1]}down.weight": tensor}
    if len(tensor.shape) != 2 or tensor.shape[0] % 2:
        return {name: tensor}
    half = tensor.shape[0] // 2
    return {
        f"{match[1]}gate.weight": tensor_views.pick_range(tensor, 0, half),
        f"{match[1]}up.weight": tensor_views.pick_range(tensor, half, 2 * half),
    }


GRANITE_MOE = replace(
    granite.GRANITE,
    name="granitemoe",
    kind="GRANITE_MOE",
    hf=("GraniteMoeForCausalLM",),
    keys=keys,
    required_shapes=required_shapes,
    optional_shapes=no_tensors,
    check=check,
    prepare=prepare,
    names=EXPERT_NAMES,
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
)

ARCHS = (GRANITE_MOE,)
