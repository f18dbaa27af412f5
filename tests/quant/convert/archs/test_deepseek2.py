"""The deepseek2 family: keys of released models, omitted prediction layers, refused settings."""

import re
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.convert import checkpoint_source
from quant.convert.archs import ARCHS
from quant.errors import UserError
from quant.native import ggml
from tests.quant import families, tiny_checkpoint
from tests.quant.families.deepseek2 import SIZES, V2, V3, v3

# The settings of the released config.json files that affect the graph.
LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
LARGE = LITE | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
}


def config(hf: str, values: dict[str, Any]) -> CheckpointConfig:
    """Return the config as convert gives it to the architecture: `values` over the defaults."""
    return CheckpointConfig({**ARCHS[hf].defaults, **values}, "config.json")


@pytest.mark.parametrize(
    ("hf", "values", "expected"),
    [
        (
            V2,
            LITE,
            {
                "attention.head_count": 16,
                "attention.head_count_kv": 1,
                "attention.key_length": 576,
                "attention.value_length": 512,
                "attention.key_length_mla": 192,
                "attention.value_length_mla": 128,
                "rope.dimension_count": 64,
                "leading_dense_block_count": 1,
                "expert_count": 64,
                "expert_used_count": 6,
                "expert_gating_func": 1,
                "expert_weights_norm": False,
                "expert_group_count": 1,
                "rope.scaling.attn_factor": 1.0,
                "rope.scaling.yarn_log_multiplier": pytest.approx(0.0707),
            },
        ),
        (
            V3,
            LARGE,
            {
                "attention.q_lora_rank": 1536,
                "attention.kv_lora_rank": 512,
                "leading_dense_block_count": 3,
                "expert_shared_count": 1,
                "expert_feed_forward_length": 2048,
                "expert_weights_scale": 2.5,
                "expert_weights_norm": True,
                "expert_gating_func": 2,
                "expert_group_count": 8,
                "expert_group_used_count": 4,
                "rope.scaling.factor": 40.0,
                "rope.scaling.attn_factor": 1.0,
                "rope.scaling.yarn_log_multiplier": pytest.approx(0.1),
                "block_count": 61,
            },
        ),
    ],
)
def test_released_models_get_the_keys_of_llama_cpp_s_converter(
    hf: str, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    arch = ARCHS[hf]
    assert arch.check(config(hf, values)) == []
    keys = {key.name: key.value for key in arch.keys(config(hf, values))}
    assert expected.items() <= keys.items()
    shapes = arch.required_shapes(config(hf, values))
    assert shapes["blk.0.ffn_gate.weight"] == (values["intermediate_size"], values["hidden_size"])
    assert ("blk.60.exp_probs_b.bias" in shapes) is (hf == V3)


@pytest.mark.parametrize(
    ("hf", "change", "message"),
    [
        (
            V2,
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "by their best two",
        ),
        (V2, {"topk_method": "noaux_tc"}, "topk_method is noaux_tc"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"mlp_bias": True}, "mlp_bias"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func is sigmoid"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is softmax"),
        (V3, {"topk_method": "greedy"}, "topk_method is greedy"),
        (V3, {"attention_bias": True}, "attention_bias"),
        (V3, {"num_key_value_heads": 2}, "share keys and values"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (V3, {"num_hidden_layers": 27}, "no q_lora_rank in a model of 27"),
        (V3, {"n_group": 3}, "cannot be split into 3 groups"),
        (V3, {"n_group": 16, "topk_group": 8}, "cannot be split into 16 groups"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 5}, "more experts than 1 groups"),
        (V3, {"num_experts_per_tok": 17}, "17 of 16 experts"),
        (V3, {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1}, "only one expert"),
        (V3, {"n_shared_experts": 0}, "n_shared_experts is 0"),
        (V3, {"qk_rope_head_dim": 31}, "rotary halves"),
        (V3, {"hidden_act": "gelu"}, "activation is gelu"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type is 'linear'"),
        (V3, {"rope_scaling": {"type": "yarn", "factor": 1.0}}, "factor of 1 or less"),
        (V3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}}, "truncate"),
    ],
)
def test_settings_that_llama_cpp_does_not_support_are_refused(
    hf: str, change: dict[str, Any], message: str
) -> None:
    arch, plain = ARCHS[hf], families.TINY | SIZES | {"n_group": 4, "topk_group": 2}
    if hf == V2:
        plain |= {"n_group": 1, "topk_group": 1}
    assert arch.check(config(hf, plain)) == []
    with pytest.raises(UserError, match=re.escape(message)):
        arch.check(config(hf, plain | change))


def test_yarn_factors_that_llama_cpp_computes_equal_transformers() -> None:
    """llama.cpp computes two YaRN factors from the keys: one for the rotated vectors, one for the
    attention scores. Both equal those of transformers.
    """
    settings = ((1.0, 1.0, 40), (0.707, 0.707, 40), (0.5, 1.2, 8), (None, None, 4), (None, 0.3, 16))
    for mscale, all_dim, factor in settings:
        yarn = {"type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": all_dim}
        values = config(V3, LARGE | {"rope_scaling": yarn})
        keys = {key.name: key.value for key in ARCHS[V3].keys(values)}
        multiplier = keys.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        vector_factor = keys["rope.scaling.attn_factor"] * (
            1.0 if multiplier else 0.1 * log(factor) + 1
        )
        score_factor = (vector_factor * (1 + 0.1 * multiplier * log(factor))) ** 2
        expected = 0.1 * log(factor) + 1
        if mscale and all_dim:
            expected = (0.1 * mscale * log(factor) + 1) / (0.1 * all_dim * log(factor) + 1)
        assert vector_factor == pytest.approx(expected)
        assert score_factor == pytest.approx((0.1 * (all_dim or 0) * log(factor) + 1) ** 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A three-layer DeepSeek-V3."""
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    return families.build(v3("small", num_hidden_layers=3), tmp_path_factory.mktemp("v3") / "model")


def test_layers_beyond_the_config_are_unknown(folder: Path, tmp_path: Path) -> None:
    """A layer that predicts a further token is recognized by its projection, not by the config."""
    short = tiny_checkpoint.copy(
        folder, tmp_path / "short", num_hidden_layers=2, num_nextn_predict_layers=1
    )
    for with_prediction in (True, False):
        with pytest.raises(UserError, match=r"model\.layers\.2\..*is unknown"):
            checkpoint_source.open_checkpoint(short, with_prediction=with_prediction)


def test_kv_b_is_split_into_keys_and_values_per_head(folder: Path) -> None:
    stored = tiny_checkpoint.read(folder / "model.safetensors")[
        "model.layers.0.self_attn.kv_b_proj.weight"
    ]
    heads = stored.reshape(8, 48 + 40, 64)
    weights = {weight.name: weight for weight in checkpoint_source.open_checkpoint(folder).weights}
    for name, expected in (("attn_k_b", heads[:, :48].swapaxes(1, 2)), ("attn_v_b", heads[:, 48:])):
        weight = weights[f"blk.0.{name}.weight"]
        assert weight.shape == tuple(reversed(expected.shape))
        decoded = ggml.decode(weight.read(0, weight.rows), weight.type, weight.columns, label=name)
        assert (decoded.reshape(expected.shape) == expected).all()
        row_spans = [
            weight.read(first, min(first + 7, weight.rows)) for first in range(0, weight.rows, 7)
        ]
        assert (
            np.concatenate(row_spans).reshape(-1) == weight.read(0, weight.rows).reshape(-1)
        ).all()


def test_kv_b_of_another_shape_is_refused_with_its_shape(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"kv_b_proj\.weight \[704, 64\] is unknown"):
        checkpoint_source.open_checkpoint(
            tiny_checkpoint.copy(folder, tmp_path / "model", v_head_dim=32)
        )


def test_fp8_weights_of_v3_are_converted_to_their_float_values(
    folder: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no eight-bit floats")
    store = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    plain: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for name, value in store.load_file(folder / "model.safetensors").items():
        plain[name] = packed[name] = value
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            codes = (value / 0.01).to(torch.float8_e4m3fn)
            scale = torch.full((-(-value.shape[0] // 128), -(-value.shape[1] // 128)), 0.01)
            packed |= {name: codes, f"{name}_scale_inv": scale}
            plain[name] = codes.float() * 0.01
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    floats = tiny_checkpoint.copy(folder, tmp_path / "floats")
    store.save_file(plain, floats / "model.safetensors")
    fp8 = tiny_checkpoint.copy(folder, tmp_path / "eight", quantization_config=method)
    store.save_file(packed, fp8 / "model.safetensors")
    for float_weight, fp8_weight in zip(
        checkpoint_source.open_checkpoint(floats).weights,
        checkpoint_source.open_checkpoint(fp8).weights,
        strict=True,
    ):
        assert (float_weight.name, float_weight.shape) == (fp8_weight.name, fp8_weight.shape)
        assert (
            float_weight.read(0, float_weight.rows) == fp8_weight.read(0, fp8_weight.rows)
        ).all(), float_weight.name
