"""The config.json of released checkpoints is accepted, with the values that transformers reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.convert import checkpoint_source
from quant.convert.archs import ARCHS
from quant.errors import UserError
from tests.quant import tiny_checkpoint
from tests.quant.released import CONFIGS

# GGUF key -> attribute of the transformers config. Compared where both exist.
NAMES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_shared_count": "n_shared_experts",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def read_config(folder: Path, config: dict[str, Any]) -> tuple[Any, CheckpointConfig]:
    """Write `config` as config.json, and return the architecture and the config that are read.

    The vocabulary size is 262144 if the config does not have it.
    """
    (folder / "config.json").write_text(json.dumps(config))
    arch, loaded = checkpoint_source.read_family(CheckpointFolder(folder))
    return arch, CheckpointConfig({"vocab_size": 262144, **loaded.values}, loaded.location)


def first_number(value: Any) -> Any:
    """Return the number of the first layer that has one, if there is a number for each layer."""
    return next(filter(None, value), 0) if isinstance(value, list) else value


@pytest.mark.parametrize("name", CONFIGS)
def test_released_config_gives_the_values_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: configs have no oracle"
    )
    arch, config = read_config(tmp_path, CONFIGS[name])
    assert all(isinstance(note, str) for note in arch.check(config))
    values = {key.name: key.value for key in arch.keys(config)}
    keys = {name: first_number(value) for name, value in values.items()}
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    theirs.allow_global_per_layer_attribute_access = True
    for key, attribute in NAMES.items():
        expected = first_number(getattr(theirs, attribute, None))
        if theirs.model_type == "xlm-roberta" and key == "context_length":
            expected -= theirs.pad_token_id + 1
        if theirs.model_type == "modernbert" and key == "attention.sliding_window":
            expected *= 2  # transformers counts the positions on one side
        if theirs.model_type == "cohere" and key == "context_length":
            expected = getattr(theirs, "model_max_length", expected)
        if attribute == "intermediate_size":  # of a dense layer
            expected = getattr(theirs, "intermediate_size_mlp", expected)
        if key == "feed_forward_length" and getattr(theirs, "block_auto_adjust_ff_dim", False):
            continue  # LFM2 computes the width from this setting
        if key in keys and expected is not None and key != "attention.head_count_kv":
            assert keys[key] == pytest.approx(expected), key
    if kv_heads := values.get("attention.head_count_kv"):
        # in hybrids, layers without attention have 0 heads
        assert (max(kv_heads) if isinstance(kv_heads, list) else kv_heads) == (
            1
            if "attention.kv_lora_rank" in keys
            else getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
        )
    rope = getattr(theirs, "rope_parameters", None) or {}
    if "rope.freq_base" in keys and "alpha" not in rope:  # Hunyuan, whose base depends on alpha
        assert keys["rope.freq_base"] == rope.get("full_attention", rope)["rope_theta"]
    if "rope.freq_base_swa" in keys:
        assert keys["rope.freq_base_swa"] == rope["sliding_attention"]["rope_theta"]
    expected = arch.required_shapes(config)
    is_tied = getattr(theirs, "tie_word_embeddings", CONFIGS[name].get("tie_word_embeddings"))
    assert ("output.weight" in expected) is not is_tied


def test_every_family_has_a_released_config() -> None:
    assert {name for config in CONFIGS.values() for name in config["architectures"]} == ARCHS.keys()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, config in CONFIGS.items()
        if "text_config" not in config and config["architectures"][0].endswith("ForCausalLM")
    ],
)
def test_config_without_a_class_uses_its_model_type(name: str, tmp_path: Path) -> None:
    """transformers also uses model_type if there is no class name."""
    config = {key: value for key, value in CONFIGS[name].items() if key != "architectures"}
    assert CONFIGS[name]["architectures"][0] in read_config(tmp_path, config)[0].hf


def test_class_of_the_text_config_does_not_override_the_class_of_the_model(
    tmp_path: Path,
) -> None:
    config = CONFIGS["gemma-3-12b-it"]
    for classes in (["Gemma3ForCausalLM"], ["Gemma3TextModel"], [], None):
        text = config["text_config"] | {"architectures": classes, "model_type": "gemma3_text"}
        arch, loaded = read_config(tmp_path, config | {"text_config": text})
        assert (arch.name, loaded.values["num_hidden_layers"]) == ("gemma3", 48)


@pytest.mark.parametrize(
    "config",
    [
        {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "text_config": {"model_type": "gemma2"},
        },
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
        {"architectures": [], "model_type": ["llama"]},
    ],
)
def test_unsupported_class_is_refused_despite_a_supported_text_config(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="supported are"):
        read_config(tmp_path, config)


def test_deepseek_v2_is_refused_for_its_groups(tmp_path: Path) -> None:
    """DeepSeek V2 (236B) and V2.5 select experts in groups; V2-Lite does not."""
    large = {
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "n_routed_experts": 160,
        "num_hidden_layers": 60,
        "q_lora_rank": 1536,
    }
    arch, config = read_config(tmp_path, CONFIGS["DeepSeek-V2-Lite"] | large)
    with pytest.raises(UserError, match="groups of experts by their best one"):
        arch.check(config)


def test_rotary_buffers_and_qlora_settings_of_old_checkpoints_are_ignored(
    stories: Path, tmp_path: Path
) -> None:
    """Llama 2 and its finetunes store rotary frequencies as tensors. Finetunes merged after QLoRA
    keep the settings of bitsandbytes.
    """
    import numpy as np

    folder = tiny_checkpoint.copy(
        stories,
        tmp_path / "old",
        quantization_config={
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
        },
    )
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    buffers = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(5)
    }
    tiny_checkpoint.save(folder / "model.safetensors", tensors | buffers)
    source, plain = (
        checkpoint_source.open_checkpoint(folder),
        checkpoint_source.open_checkpoint(stories),
    )
    assert [weight.name for weight in source.weights] == [weight.name for weight in plain.weights]
    assert "llmcli.convert.source_method" not in dict(source.entries)
