"""Config settings that llama.cpp's graph of the architecture ignores are refused by name."""

from typing import Any

import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import ARCHS
from quant.errors import UserError
from tests.quant import families
from tests.quant.released import CONFIGS

QWEN3_VL = CONFIGS["Qwen3-VL-4B-Instruct"]["text_config"]
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
        ("Qwen3NextForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Qwen3NextForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("Qwen3NextForCausalLM", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Qwen3NextForCausalLM", {"linear_value_head_dim": 64}, "different widths"),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 4}, "6 value heads"),
        ("Qwen3NextForCausalLM", {"full_attention_interval": 5}, "all of one kind"),
        ("Qwen3NextForCausalLM", {"layer_types": ["full_attention"] * 4}, "all of one kind"),
        ("Qwen3NextForCausalLM", {"layer_types": ["full_attention"]}, "4 entries"),
        ("Qwen3NextForCausalLM", {"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"mrope_section": [3, 3]}}, "three numbers"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"mrope_section": [0, 0, 0]}}, "three numbers"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {}}, "do not fit 8 pairs"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"mrope_section": [3, 3, 2, 1]}}, "do not fit"),
        ("Qwen3_5ForCausalLM", {"rope_parameters": {"mrope_section": [1, 1, 1]}}, "other sections"),
        (
            "Qwen2VLForConditionalGeneration",
            {"text_config": None, "rope_parameters": {"mrope_section": [4, 6, 5]}},
            "do not make",
        ),
        ("Qwen3_5MoeForCausalLM", {"num_experts_per_tok": 9}, "9 of 8 experts"),
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
        ("ModernBertModel", {"norm_bias": True}, "norm_bias"),
        ("ModernBertModel", {"hidden_activation": "relu"}, "activation is relu"),
        ("ModernBertModel", {"classifier_pooling": "max"}, "classifier_pooling is max"),
        ("ModernBertModel", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "scaled"),
        (
            "ModernBertForSequenceClassification",
            {
                "classifier_activation": "silu",
                "architectures": ["ModernBertForSequenceClassification"],
            },
            "head's activation is silu",
        ),
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
    with pytest.raises(UserError, match=r"types of layers \(layer_types\)"):
        config("GraniteMoeHybridForCausalLM", layer_types=types)


def test_unknown_types_of_layers_are_refused_under_their_old_name() -> None:
    case = next(case for case in families.cases() if case.hf == "GraniteMoeHybridForCausalLM")
    settings = families.settings(case) | {"layers_block_type": ["mamba", "x"]}
    settings.pop("layer_types", None)
    with pytest.raises(UserError, match=r"types of layers \(layers_block_type\)"):
        ARCHS[case.hf].resolve(CheckpointConfig(settings, "config.json"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M-*X", "layers_block_type or layer_types or hybrid_override_pattern"),
        (["M"], "layers_block_type or layer_types or hybrid_override_pattern"),
        ("", "num_hidden_layers is 0"),
        (7, "has no num_hidden_layers"),
        (None, "has no num_hidden_layers"),
    ],
)
def test_unknown_pattern_of_layers_is_refused(pattern: Any, message: str) -> None:
    changes = {"layers_block_type": None, "hybrid_override_pattern": pattern}
    arch = ARCHS["NemotronHForCausalLM"]
    with pytest.raises(UserError, match=message):
        arch.keys(config("NemotronHForCausalLM", **changes))


def test_one_error_names_all_problems() -> None:
    changes = {"mlp_only_layers": [0], "norm_topk_prob": True, "head_dim": 64, "hidden_act": "gelu"}
    with pytest.raises(
        UserError, match=r"gelu.*mlp_only_layers.*hidden_size / heads.*norm_topk_prob"
    ):
        ARCHS["Qwen2MoeForCausalLM"].check(config("Qwen2MoeForCausalLM", **changes))


def test_other_eps_of_linear_attention_is_reported() -> None:
    notes = ARCHS["Qwen3NextForCausalLM"].check(config("Qwen3NextForCausalLM", rms_norm_eps=1e-5))
    assert "1e-06 in transformers and 1e-05 in llama.cpp" in notes[0]


@pytest.mark.parametrize(("sections", "is_reported"), [([24, 20, 20], True), ([22, 21, 21], False)])
def test_rotary_pairs_that_llama_cpp_does_not_rotate_are_reported(
    sections: list[int], is_reported: bool
) -> None:
    """The sections of Qwen3-VL leave two slow pairs of 64 to the fourth position."""
    rope = {"rope_theta": 5e6, "mrope_section": sections}
    values = QWEN3_VL | {"rope_scaling": rope}
    notes = ARCHS["Qwen3VLForConditionalGeneration"].check(CheckpointConfig(values, "config.json"))
    assert bool(notes) is is_reported
    assert not notes or "0.11 radians" in notes[0]


@pytest.mark.parametrize("indexes", [3, [1] * 40, {}])
def test_malformed_deepstack_indexes_are_refused(indexes: object) -> None:
    values = QWEN3_VL | {"vision_config": {"deepstack_visual_indexes": indexes}}
    with pytest.raises(UserError, match="deepstack_visual_indexes"):
        ARCHS["Qwen3VLForConditionalGeneration"].check(CheckpointConfig(values, "config.json"))


@pytest.mark.parametrize("hf", ["MistralForCausalLM", "MixtralForCausalLM"])
def test_unsupported_sliding_window_is_reported(hf: str) -> None:
    assert "64 positions" in ARCHS[hf].check(config(hf, sliding_window=64))[0]
