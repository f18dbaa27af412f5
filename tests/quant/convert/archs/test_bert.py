"""Pooling, labels and notes of encoders, and settings that llama.cpp's bert does not support."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.convert import checkpoint_source
from quant.convert.archs import ARCHS, bert
from quant.convert.parts.base import POOLING_FILE
from quant.errors import UserError
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import families
from tests.quant.checkpoint.test_tensor_views import lazy
from tests.quant.released import CONFIGS

BGE = "bge-small-en-v1.5"
RERANKER = "bge-reranker-v2-m3"


def keys(name: str, folder: Path, pooling: Any = None, **changes: Any) -> dict[str, Any]:
    """Return the metadata keys of a released config with `changes`, in a folder with the settings
    `pooling` of sentence-transformers.
    """
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / POOLING_FILE).write_text(json.dumps(pooling))
    arch, config = checkpoint_source.read_family(CheckpointFolder(folder))
    arch.check(config)
    return {key.full_name(arch.name): key.value for key in arch.keys(config)}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, bert.CLS),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, bert.MEAN),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 384}, bert.LAST),
        ({"pooling_mode": "mean", "embedding_dimension": 384}, bert.MEAN),
        (None, None),
    ],
)
def test_pooling_of_sentence_transformers_is_recorded(
    pooling: Any, expected: int | None, tmp_path: Path
) -> None:
    assert keys(BGE, tmp_path, pooling).get("bert.pooling_type") == expected


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode": ["mean"]},
    ],
)
def test_other_pooling_is_refused(pooling: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="combines vectors as llama"):
        keys(BGE, tmp_path, pooling)


def test_reranker_has_its_pooling_and_labels(tmp_path: Path) -> None:
    found = keys(RERANKER, tmp_path, {"pooling_mode_max_tokens": True})
    assert found["bert.pooling_type"] == bert.RANK
    assert found["bert.classifier.output_labels"] == ["LABEL_0"]
    assert found["bert.context_length"] == 8192
    assert found["tokenizer.ggml.token_type_count"] == 1


@pytest.mark.parametrize(
    ("id2label", "expected"),
    [
        ({"1": "good", "0": "bad"}, ["bad", "good"]),
        ({"10": "k", "9": "j"}, ["j", "k"]),
        (None, ["LABEL_0", "LABEL_1"]),
        ([], ["LABEL_0", "LABEL_1"]),
    ],
)
def test_labels_are_sorted_by_number(id2label: Any, expected: list[str]) -> None:
    assert bert.labels(CheckpointConfig({"id2label": id2label}, "config.json")) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "activation is relu"),
        ({"position_embedding_type": "relative_key"}, "positions are relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 7}, "7 heads cannot share"),
        ({"num_hidden_layers": 1000}, "1000 layers"),
        ({"max_position_embeddings": 2}, "no positions"),
        ({"id2label": {}}, "no labels"),
    ],
)
def test_unsupported_setting_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        keys(RERANKER, tmp_path, **changes)


def test_note_tells_that_pairs_are_scored_without_types(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["ms-marco-MiniLM-L6-v2"]))
    arch, config = checkpoint_source.read_family(CheckpointFolder(tmp_path))
    (note,) = arch.check(config)
    assert "token types" in note


@pytest.mark.parametrize(
    ("hf", "names"),
    [
        (
            "BertModel",
            ["bert.embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight"],
        ),
        ("BertModel", ["embeddings.LayerNorm.gamma", "embeddings.LayerNorm.weight"]),
        ("ModernBertModel", ["model.final_norm.weight", "final_norm.weight"]),
        ("NomicBertModel", ["embeddings.LayerNorm.weight", "emb_ln.weight"]),
        ("Mamba2ForCausalLM", ["model.backbone.norm_f.weight", "backbone.norm_f.weight"]),
        ("NemotronHForCausalLM", ["model.norm_f.weight", "backbone.norm_f.weight"]),
    ],
)
def test_both_tensors_are_kept_if_they_would_get_the_same_name(hf: str, names: list[str]) -> None:
    """The converter then reports the one with the unknown name."""
    case = next(case for case in families.cases() if case.hf == hf)
    arch, config = ARCHS[hf].resolve(CheckpointConfig(families.settings(case), "config.json"))
    for order in (names, names[::-1]):
        tensors = {name: lazy(np.zeros((4, 4), np.float32), name) for name in order}
        assert set(arch.prepare(config, tensors)) == set(names)


def test_names_of_the_first_checkpoints_are_read(tmp_path: Path) -> None:
    """TensorFlow's names of norms, prefixes of the class, and heads for training."""
    from safetensors.numpy import load_file, save_file

    case = next(case for case in families.cases() if case.name == "bert")
    folder = families.build(case, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = np.arange(8)
    old["cls.seq_relationship.weight"] = np.zeros((2, 256), np.float32)
    plain = write_f32(folder, tmp_path / "plain.gguf")
    save_file(old, folder / "model.safetensors")
    assert write_f32(folder, tmp_path / "old.gguf") == plain


def write_f32(folder: Path, out: Path) -> bytes:
    """Convert a folder to F32, and return the data of the tensors."""
    source = checkpoint_source.open_checkpoint(folder)
    write.write_model(plan.plan_quantization(source, "F32"), out)
    start = read_header.read_header(out).tensors[0].offset
    return out.read_bytes()[start:]
