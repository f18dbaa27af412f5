"""Refusals of Gemma 3n, Gemma 4, Llama 4, LFM2 and Mistral, and separate experts of Gemma 4."""

from typing import Any

import numpy as np
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.safetensors import Tensors
from quant.convert.archs import ARCHS
from quant.convert.parts import experts
from quant.errors import UserError
from tests.quant import families
from tests.quant.checkpoint.test_tensor_views import lazy, values

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("hf", "changes", "problem"),
    [
        ("Gemma4ForCausalLM", {"layer_types": [FULL] * 6}, "no layer with a sliding window"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 1}, "do not follow a layer with a window"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 5}, "fewer than two layers"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "later tokens"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"1": {"rank": 1}}}, "unknown settings"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"1": {"head_dim": 64}}}, "different widths"),
        ("Gemma3nForCausalLM", {"laurel_rank": 32}, "laurel_rank is 32, not 64"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 4}, "8 of 12 layers"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.0] * 12}, "0.95"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 64}, "attention_chunk_size is 64"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1] * 5}, "no_rope_layers"),
        ("Llama4ForCausalLM", {"use_qk_norm": False}, "use_qk_norm"),
        ("Lfm2ForCausalLM", {"conv_bias": True}, "conv_bias"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 4}, "both convolutions and attention"),
        ("Lfm2MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("Ministral3ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0,
          "rope_theta": 1e4}, "model_type": "ministral3"}, "no llama_4_scaling_beta"),
    ],
)  # fmt: skip
def test_settings_that_llama_cpp_ignores_are_refused(
    hf: str, changes: dict[str, Any], problem: str
) -> None:
    case = next(case for case in families.cases() if case.hf == hf)
    stored = CheckpointConfig({**families.settings(case), **changes}, "config.json")
    arch, config = ARCHS[hf].resolve(stored)
    with pytest.raises(UserError, match=problem):
        arch.check(config)


def test_gates_and_ups_of_separate_experts_are_joined() -> None:
    random, prefix = np.random.default_rng(5), "model.layers.0.experts"
    arrays = {
        f"{prefix}.{expert}.{kind}.weight": random.normal(size=shape).astype(np.float32)
        for expert in range(3)
        for kind, shape in (("gate_proj", (4, 8)), ("up_proj", (4, 8)), ("down_proj", (8, 4)))
    }
    tensors: Tensors = {name: lazy(array, name) for name, array in arrays.items()}
    config = CheckpointConfig({"num_experts": 3}, "config.json")
    result = experts.stack_gate_up(config, tensors)
    assert result.keys() == {f"{prefix}.gate_up_proj.weight", f"{prefix}.down_proj.weight"}
    joined = result[f"{prefix}.gate_up_proj.weight"]
    assert joined.shape == (3, 8, 8)
    expected = [
        arrays[f"{prefix}.{expert}.{kind}.weight"]
        for expert in range(3)
        for kind in ("gate_proj", "up_proj")
    ]
    assert (values(joined).reshape(24, 8) == np.concatenate(expected)).all()
