"""Gemma 3: embedding rows without tokens, tokens without rows, and configs with few settings."""

import json
import shutil
from pathlib import Path

import pytest

from llmcli.runtime.binding.model import open_model
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.convert import checkpoint_source
from quant.convert.archs.gemma3 import GEMMA3
from quant.gguf.layout import encode_entry, lay_out_file
from quant.model_file import read_header
from quant.quantize import plan, write
from quant.tokenizer import vocabulary
from quant.tokenizer.verify import verify
from tests.quant import families, tiny_checkpoint
from tests.quant.families.gemma3 import case

FLAGS = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
IMAGE = {"id": 512, "content": "<image_soft_token>", **FLAGS}


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A model with 64 padding rows in the embedding, and an image token after the text tokens."""
    pytest.importorskip(
        "transformers", reason="transformers is not installed: there is no checkpoint"
    )
    folder = families.build(case("padded", vocab_size=576), tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tiny_checkpoint.edit(
        folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], IMAGE]
    )
    return folder


def test_rows_without_a_token_are_removed_if_the_config_has_no_vocabulary_size(
    padded: Path, tmp_path: Path
) -> None:
    theirs = families.theirs(padded)[:, :512]
    tiny_checkpoint.edit(padded / "config.json", vocab_size=None)
    source = checkpoint_source.open_checkpoint(padded)
    assert "token '<image_soft_token>' is left out: the model has no row for it" in source.notes
    write.write_model(plan.plan_quantization(source, "F32"), tmp_path / "out.gguf")
    assert families.nmse(families.ours(tmp_path / "out.gguf"), theirs) < 1e-6


def test_vocabulary_size_of_the_config_is_used(padded: Path) -> None:
    source = checkpoint_source.open_checkpoint(padded)
    assert {weight.name: weight.shape for weight in source.weights}["token_embd.weight"] == (
        256,
        576,
    )
    assert not source.notes


def test_tokenizer_is_verified_without_tokens_that_have_no_row(
    stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    tiny_checkpoint.edit(folder / "tokenizer.json", added_tokens=[*added, IMAGE])
    loaded = vocabulary.load_vocabulary(
        CheckpointFolder(folder), CheckpointConfig({}, "config.json"), size_from_tokenizer=True
    )
    assert loaded.size == 512
    out = tmp_path / "v.gguf"
    out.write_bytes(
        lay_out_file(
            [("general.architecture", encode_entry("string", "gemma3")), *loaded.entries], [], 32
        ).header
    )
    with open_model(out, vocab_only=True) as model:
        assert (
            verify.verify_vocabulary(folder, read_header.read_header(out).metadata, model).notes
            == ()
        )


def test_omitted_vision_part_is_reported(tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: there is no checkpoint"
    )
    [multimodal] = [
        case for case in families.cases() if case.hf == "Gemma3ForConditionalGeneration"
    ]
    source = checkpoint_source.open_checkpoint(families.build(multimodal, tmp_path / "model"))
    assert any("only the language part is converted" in note for note in source.notes)


def test_config_with_sizes_only_gets_the_defaults_of_transformers() -> None:
    """The `text_config` of Gemma 3 4B is sparse; the other settings are the defaults of
    transformers.
    """
    text_config = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "vocab_size": 262144,
    }
    config = CheckpointConfig({**GEMMA3.defaults, **text_config}, "config.json")
    assert GEMMA3.check(config) == []
    keys = {key.name: key.value for key in GEMMA3.keys(config)}
    assert keys == {
        "block_count": 34,
        "context_length": 131072,
        "embedding_length": 2560,
        "feed_forward_length": 10240,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 262144,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "attention.sliding_window": 1024,
    }
    assert "output.weight" not in GEMMA3.required_shapes(config)
