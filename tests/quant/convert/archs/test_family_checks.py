"""Settings of families with experts, windows or other norms that llama.cpp computes differently are
refused by name.
"""

from typing import Any

import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import ARCHS
from quant.errors import UserError
from tests.quant import families
from tests.quant.families import afmoe, cohere, exaone4

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
TWO_BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FAR = {"full_attention": YARN, "sliding_attention": YARN}
GLOBAL_LAYERS = ["full_attention"] * 4


def check(hf: str, changes: dict[str, Any], base: dict[str, Any] | None = None) -> list[str]:
    """Check the config of the first test case of the class `hf`, or TINY and `base`, with
    `changes`. Return the notes.
    """
    case = next(case for case in families.cases() if case.hf == hf)
    values = families.settings(case if base is None else families.Case("", hf, base))
    arch, config = ARCHS[hf].resolve(CheckpointConfig(values | changes, "config.json"))
    return arch.check(config)


@pytest.mark.parametrize(
    ("hf", "changes", "problem"),
    [
        ("Olmo3ForCausalLM", {"rope_parameters": TWO_BASES}, "two rotary bases"),
        ("Olmo3ForCausalLM", {"rope_parameters": FAR}, "scaled positions"),
        ("Olmo3ForCausalLM", {"rope_parameters": YARN}, "do not distinguish"),
        ("Olmo3ForCausalLM", {"rope_theta": 1e6}, "two rotary bases"),
        ("OlmoeForCausalLM", {"num_key_value_heads": 4}, "share keys and values"),
        ("OlmoeForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("SeedOssForCausalLM", {"attention_out_bias": True}, "attention_out_bias"),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, "activation is silu"),
        ("Exaone4ForCausalLM", {"sliding_window": 64}, "contradict"),
        (
            "Exaone4ForCausalLM",
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
            "not 64 layers",
        ),
        ("Dots1ForCausalLM", {"num_key_value_heads": 4}, "share keys and values"),
        ("Dots1ForCausalLM", {"sliding_window": 64, "max_window_layers": 1}, "sliding window"),
        (
            "Dots1ForCausalLM",
            {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3},
            "sliding window",
        ),
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "scoring_func is softmax"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "cannot be split into 3 groups"),
        (
            "Glm4MoeLiteForCausalLM",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "mlp_layer_types",
        ),
        ("GlmMoeDsaForCausalLM", {"indexer_types": ["shared"] * 3}, "indexer_types"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": ["full", "x", "full"]}, "indexer_types"),
        ("GlmMoeDsaForCausalLM", {"index_head_dim": 48}, "48 values"),
        ("GlmMoeDsaForCausalLM", {"rope_parameters": YARN}, "scaled"),
        ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "not compressed"),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, "use_bias"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_interval": 2}, "moe_layer_interval"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": 1}, "moe_layer_end_index"),
        ("HunYuanDenseV1ForCausalLM", {"num_experts": 4}, "mixture of experts"),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic without alpha",
        ),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [3, 2]}, "differ in moe_topk"),
        ("HunYuanMoEV1ForCausalLM", {"num_shared_expert": 2}, "one shared expert"),
        ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": 64}, "moe_intermediate_size"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0]}, "linear attention"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 65}, "rotary_dim is 65"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 64}, "shared experts"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "sigmoid"),
        ("ExaoneMoeForCausalLM", {"layer_types": GLOBAL_LAYERS}, "sliding window"),
        ("StableLmForCausalLM", {"head_dim": 64}, "hidden_size / heads"),
        ("Starcoder2ForCausalLM", {"use_bias": False}, "no biases"),
        ("NemotronForCausalLM", {"hidden_act": "gelu"}, "activation is gelu"),
        ("OlmoForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "norms of the heads from 64 layers"),
        ("CohereForCausalLM", {"tie_word_embeddings": False}, "not tied"),
        ("Cohere2ForCausalLM", {"rotary_pct": 0.5}, "rotary_pct"),
        ("Cohere2ForCausalLM", {"layer_types": GLOBAL_LAYERS}, "sliding window"),
        ("AfmoeForCausalLM", {"mup_enabled": False}, "mup_enabled"),
        ("AfmoeForCausalLM", {"sliding_window": None}, "sliding_window is null"),
        ("AfmoeForCausalLM", {"global_attn_every_n_layers": 2}, "windows except every 4th"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
        ("Jais2ForCausalLM", {"mlp_bias": False}, "no biases"),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, "activation is silu"),
        ("GPTNeoXForCausalLM", {"attention_bias": False}, "no biases"),
        ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scaled by layer"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "another model"),
    ],
)
def test_unsupported_setting_is_refused(hf: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check(hf, changes)


def test_exaone4_of_64_layers_needs_a_window() -> None:
    no_window = {"sliding_window": None, "layer_types": ["full_attention"] * 64}
    with pytest.raises(UserError, match="64 layers a sliding window"):
        check("Exaone4ForCausalLM", no_window, exaone4.HYBRID)


@pytest.mark.parametrize(
    ("hf", "changes", "base"),
    [
        ("Dots1ForCausalLM", {"sliding_window": 64}, None),
        ("Dots1ForCausalLM", {"scoring_func": "noaux_tc"}, None),
        ("Dots1ForCausalLM", {"sliding_window": 4096, "max_window_layers": 1}, None),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": 2}, None),
        ("CohereForCausalLM", {}, cohere.LARGE),
        ("AfmoeForCausalLM", {"n_group": 4, "topk_group": 2}, afmoe.SMALL),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "FSF"}, None),
        ("GlmMoeDsaForCausalLM", {"index_topk_freq": 2, "index_skip_topk_offset": 1}, None),
    ],
)
def test_setting_that_llama_cpp_supports_is_accepted(
    hf: str, changes: dict[str, Any], base: dict[str, Any] | None
) -> None:
    check(hf, changes, base)


@pytest.mark.parametrize("hf", ["Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM"])
def test_prediction_layers_that_llama_cpp_does_not_run_are_reported(hf: str) -> None:
    assert check(hf, {"num_nextn_predict_layers": 1}) == [
        "layers that predict further tokens (MTP) are not converted"
    ]


def test_ignored_window_is_reported() -> None:
    assert "64 positions" in check("Starcoder2ForCausalLM", {"sliding_window": 64})[0]


def test_kinds_of_indexer_layers_follow_from_any_spelling() -> None:
    arch = ARCHS["GlmMoeDsaForCausalLM"]
    case = next(case for case in families.cases() if case.hf == arch.hf[0])
    for changes, layers in (
        ({}, [True, True, True]),
        ({"indexer_types": ["full", "shared", "full"]}, [True, False, True]),
        ({"index_topk_pattern": "FSS"}, [True, False, False]),
        ({"index_topk_freq": 2}, [True, True, False]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [True, False, True]),
    ):
        values = families.settings(case) | changes
        _, config = arch.resolve(CheckpointConfig(values, "config.json"))
        keys = {key.name: key.value for key in arch.keys(config)}
        assert keys["attention.indexer.types"] == layers
