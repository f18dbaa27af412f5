"""Config settings that llama.cpp's graph of the architecture ignores are refused by name."""

from typing import Any

import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import ARCHS
from quant.errors import UserError
from tests.quant import families

WINDOW = {"use_sliding_window": True, "sliding_window": 64}


def config(hf: str, **changes: Any) -> CheckpointConfig:
    """Return the config of the first test case of the class `hf`, with `changes`."""
    case = next(case for case in families.cases() if case.hf == hf)
    return ARCHS[hf].resolve(CheckpointConfig(families.settings(case) | changes, "config.json"))[1]


@pytest.mark.parametrize(
    ("hf", "changes", "problem"),
    [
        ("Qwen2ForCausalLM", WINDOW | {"max_window_layers": 1}, "window"),
        ("Qwen2ForCausalLM", WINDOW | {"max_window_layers": 0}, "window"),
        (
            "Qwen2ForCausalLM",
            WINDOW | {"layer_types": ["full_attention", "sliding_attention"]},
            "window",
        ),
        ("Qwen2ForCausalLM", {"head_dim": 64}, "hidden_size / heads"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "llama3"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            "Qwen2ForCausalLM",
            {"rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}},
            "mrope",
        ),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Qwen3ForCausalLM", WINDOW | {"max_window_layers": 1}, "window"),
        ("Qwen3ForCausalLM", {"hidden_act": "gelu"}, "gelu"),
        ("Qwen2MoeForCausalLM", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("Qwen2MoeForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("Qwen2MoeForCausalLM", WINDOW | {"max_window_layers": 1}, "window"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("Qwen3MoeForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", WINDOW, "window"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("LlamaForCausalLM", {"num_local_experts": 4}, "mixture of experts"),
        ("GraniteForCausalLM", {"partial_rotary_factor": 0.5}, "part of each head"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 0, 1]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 5}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"mlp_bias": True}, "mlp_bias"),
        ("SmolLM3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("SmolLM3ForCausalLM", WINDOW, "window"),
        ("Olmo2ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("Olmo2ForCausalLM", {"head_dim": 64}, "hidden_size / heads"),
        ("GraniteMoeHybridForCausalLM", {"mamba_expand": 3}, "mamba_expand is 3"),
        ("GraniteMoeHybridForCausalLM", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("GraniteMoeHybridForCausalLM", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, "alibi"),
        ("NemotronHForCausalLM", {"mlp_hidden_act": "silu"}, "activations are silu"),
        ("NemotronHForCausalLM", {"use_bias": True}, "use_bias"),
        ("FalconH1ForCausalLM", {"mamba_rms_norm": True}, "before the gate"),
        ("FalconH1ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("FalconH1ForCausalLM", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "llama3"),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": None, "hybrid_override_pattern": "M-*E"},
            "some layers have no experts",
        ),
    ],
)
def test_unsupported_setting_is_refused(hf: str, changes: dict[str, Any], problem: str) -> None:
    values = config(hf, **changes)
    with pytest.raises(UserError, match=problem):
        ARCHS[hf].check(values)


@pytest.mark.parametrize(
    ("hf", "changes"),
    [
        ("Qwen2ForCausalLM", {"sliding_window": 64, "max_window_layers": 1}),  # not used
        (
            "Qwen2ForCausalLM",
            WINDOW | {"sliding_window": 4096, "max_window_layers": 1},
        ),  # wider than the model
        ("Qwen3ForCausalLM", WINDOW | {"layer_types": ["full_attention", "full_attention"]}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": []}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1, 0, 1]}),
    ],
)
def test_setting_without_effect_is_accepted(hf: str, changes: dict[str, Any]) -> None:
    assert ARCHS[hf].check(config(hf, **changes)) == []


@pytest.mark.parametrize("types", [["mamba"], ["mamba", "x", [], 3], "mamba", 7])
def test_unknown_types_of_layers_are_refused(types: Any) -> None:
    with pytest.raises(UserError, match="types of layers"):
        config("GraniteMoeHybridForCausalLM", layer_types=types)


@pytest.mark.parametrize("pattern", ["M-*X", "", 7, ["M"], None])
def test_unknown_pattern_of_layers_is_refused(pattern: Any) -> None:
    changes = {"layers_block_type": None, "hybrid_override_pattern": pattern}
    arch = ARCHS["NemotronHForCausalLM"]
    with pytest.raises(UserError):
        arch.keys(config("NemotronHForCausalLM", **changes))


def test_one_error_names_all_problems() -> None:
    changes = {"mlp_only_layers": [0], "norm_topk_prob": True, "head_dim": 64, "hidden_act": "gelu"}
    with pytest.raises(
        UserError, match=r"gelu.*mlp_only_layers.*hidden_size / heads.*norm_topk_prob"
    ):
        ARCHS["Qwen2MoeForCausalLM"].check(config("Qwen2MoeForCausalLM", **changes))


@pytest.mark.parametrize("hf", ["MistralForCausalLM", "MixtralForCausalLM"])
def test_unsupported_sliding_window_is_reported(hf: str) -> None:
    assert "64 positions" in ARCHS[hf].check(config(hf, sliding_window=64))[0]
