"""Qwen3.5 and 3.6 with experts: the layers of the dense models, with experts and one shared expert
in every layer. The vision part is left out.

Follows Qwen3_5MoeTextModel of llama.cpp (conversion/qwen.py, src/models/qwen35moe.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import qwen2_moe, qwen3_next, qwen35
from quant.convert.parts import checks, experts
from quant.convert.parts.base import ArchKey, Shapes


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen35moe computes differently; return notes
    for the user.
    """
    checks.raise_problems(config, [*qwen35.problems(config), *experts.expert_problems(config)])
    return qwen35.notes(config)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the metadata keys of the dense models, then those of the experts."""
    return [*qwen35.hybrid_keys(config), *qwen2_moe.expert_keys(config)]


def required_shapes(config: CheckpointConfig) -> Shapes:
    """Return the shapes of all tensors that a converted model must have, rows first, by
    GGUF name.
    """
    return qwen3_next.hybrid_shapes(
        config, qwen35.linear_attention_shapes(config), qwen2_moe.gated_expert_shapes(config)
    )


def prepare(config: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with experts stacked and names that gguf_tables.py knows."""
    return qwen3_next.rename_linear(config, experts.stack_experts(config, tensors))


QWEN35MOE = replace(
    qwen35.QWEN35,
    name="qwen35moe",
    kind="QWEN35MOE",
    hf=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    keys=keys,
    required_shapes=required_shapes,
    check=check,
    prepare=prepare,
    prediction_shapes=qwen3_next.prediction_shapes,
    defaults={
        **qwen3_next.LINEAR_DEFAULTS,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)

ARCHS = (QWEN35MOE,)
