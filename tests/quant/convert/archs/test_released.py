"""config.json of released checkpoints: accepted, and every key is read as by transformers."""

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

# Key of the file -> transformers' name; read where both are there.
NAMES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
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


def opened(folder: Path, config: dict[str, Any]) -> tuple[Any, CheckpointConfig]:
    """The family and config of a folder that has only a config.json; 262144 words where it does not
    say.
    """
    (folder / "config.json").write_text(json.dumps(config))
    arch, found = checkpoint_source.read_family(CheckpointFolder(folder))
    return arch, CheckpointConfig({"vocab_size": 262144, **found.values}, found.location)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_released_config_is_followed(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: configs have no oracle"
    )
    arch, config = opened(tmp_path, CONFIGS[name])
    assert all(isinstance(note, str) for note in arch.check(config))
    keys = {key.name: key.value for key in arch.keys(config)}
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    for key, attribute in NAMES.items():
        expected = getattr(theirs, attribute, None)
        if key in keys and expected is not None:
            assert keys[key] == pytest.approx(expected), key
    assert keys["attention.head_count_kv"] == (
        1 if arch.name == "deepseek2" else theirs.num_key_value_heads
    )
    parts = theirs.rope_parameters
    assert keys["rope.freq_base"] == parts.get("full_attention", parts)["rope_theta"]
    if "rope.freq_base_swa" in keys:
        assert keys["rope.freq_base_swa"] == parts["sliding_attention"]["rope_theta"]
    expected = arch.required_shapes(config)
    assert ("output.weight" in expected) is not theirs.tie_word_embeddings


def test_every_family_has_a_released_config() -> None:
    assert {name for config in CONFIGS.values() for name in config["architectures"]} == ARCHS.keys()


@pytest.mark.parametrize("name", [name for name in CONFIGS if "text_config" not in CONFIGS[name]])
def test_a_config_that_names_no_class_is_what_its_type_says(name: str, tmp_path: Path) -> None:
    """As in transformers, which goes by model_type alone."""
    config = {key: value for key, value in CONFIGS[name].items() if key != "architectures"}
    assert opened(tmp_path, config)[0] is ARCHS[CONFIGS[name]["architectures"][0]]


def test_a_text_part_that_names_its_own_class_or_none_does_not_hide_the_whole(
    tmp_path: Path,
) -> None:
    config = CONFIGS["gemma-3-12b-it"]
    for named in (["Gemma3ForCausalLM"], ["Gemma3TextModel"], [], None):
        text = config["text_config"] | {"architectures": named, "model_type": "gemma3_text"}
        arch, found = opened(tmp_path, config | {"text_config": text})
        assert (arch.name, found.values["num_hidden_layers"]) == ("gemma3", 48)


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
def test_another_class_is_not_taken_for_its_text_part(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="supported are"):
        opened(tmp_path, config)


def test_deepseek_v2_is_refused_for_its_groups(tmp_path: Path) -> None:
    """DeepSeek V2 (236B) and V2.5, not V2-Lite."""
    large = {
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "n_routed_experts": 160,
        "num_hidden_layers": 60,
        "q_lora_rank": 1536,
    }
    arch, config = opened(tmp_path, CONFIGS["DeepSeek-V2-Lite"] | large)
    with pytest.raises(UserError, match="groups of experts by their best one"):
        arch.check(config)


def test_what_old_checkpoints_carry_beside_their_weights_is_left_out(
    stories: Path, tmp_path: Path
) -> None:
    """Llama 2 and its finetunes hold rotary frequencies, and those merged after QLoRA its settings."""
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
    found, plain = (
        checkpoint_source.open_checkpoint(folder),
        checkpoint_source.open_checkpoint(stories),
    )
    assert [weight.name for weight in found.weights] == [weight.name for weight in plain.weights]
    assert "llmcli.convert.source_method" not in dict(found.entries)
