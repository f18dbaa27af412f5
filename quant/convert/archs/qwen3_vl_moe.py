"""Qwen3-VL with experts: Qwen3-MoE with rotary positions in sections (see qwen3_vl.py). The vision
part is left out.

Follows Qwen3VLMoeTextModel of llama.cpp (conversion/qwen3vl.py, src/models/qwen3vlmoe.cpp). The
checkpoint stores the matrices of fused experts transposed. Those that are not, as transformers 5
saves them, are recognized by their shape, as transformers does; llama.cpp's converter garbles them.
"""

from dataclasses import replace

from quant.checkpoint import tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert.archs import qwen3_vl
from quant.convert.archs.qwen2_moe import problem_dense_blocks
from quant.convert.archs.qwen3_moe import QWEN3MOE
from quant.convert.parts import checks, experts
from quant.convert.parts.base import ArchKey


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3vlmoe computes differently; return notes
    for the user.
    """
    checks.raise_problems(
        config,
        [
            *qwen3_vl.section_problems(config, qwen3_vl.SECTIONS),
            *experts.expert_problems(config),
            *problem_dense_blocks(config),
            checks.problem_biases(config, "attention_bias"),
        ],
    )
    qwen3_vl.deepstack_count(config)
    return qwen3_vl.section_notes(config, qwen3_vl.SECTIONS)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of Qwen3-MoE, then those of the rotary sections and the vision
    part.
    """
    return [
        *QWEN3MOE.keys(config),
        *qwen3_vl.section_keys(config, qwen3_vl.SECTIONS),
        ArchKey("n_deepstack_layers", "uint32", qwen3_vl.deepstack_count(config)),
    ]


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with fused experts transposed and split."""
    turned = {name: _turn_experts(config, name, tensor) for name, tensor in tensors.items()}
    return experts.stack_experts(config, turned)


def _turn_experts(config: CheckpointConfig, name: str, tensor: LazyTensor) -> LazyTensor:
    """Transpose the matrices of fused experts, unless they have the shape [output, input] already.
    Any other tensor stays unchanged.
    """
    hidden, width = config.get_int("hidden_size"), config.get_int("moe_intermediate_size")
    count = experts.expert_count(config)
    if experts.FUSED_GATE_UP_NAME.fullmatch(name):
        usual, stored = (count, 2 * width, hidden), (count, hidden, 2 * width)
    elif experts.FUSED_DOWN_NAME.fullmatch(name):
        usual, stored = (count, hidden, width), (count, width, hidden)
    else:
        return tensor
    if tensor.shape != stored or stored == usual:
        return tensor
    return tensor_views.keep_matrices(tensor_views.transpose(tensor))


QWEN3VLMOE = replace(
    QWEN3MOE,
    name="qwen3vlmoe",
    kind="QWEN3VLMOE",
    hf=("Qwen3VLMoeForConditionalGeneration",),
    keys=keys,
    check=check,
    prepare=prepare,
    defaults={
        "rope_theta": 500000.0,
        "max_position_embeddings": 128000,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
    },
)

ARCHS = (QWEN3VLMOE,)
