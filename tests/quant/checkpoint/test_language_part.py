"""Multimodal checkpoints: the converted language model equals that of a text-only checkpoint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.quantize import write
from tests.quant import tiny_checkpoint

TOWERS = {
    "vision_tower.vision_model.embeddings.patch_embedding.weight": (4, 3, 2, 2),
    "model.visual.blocks.0.attn.qkv.bias": (12,),
    "visual.patch_embed.proj.weight": (4, 4),
    "audio_tower.layers.0.fc1.weight": (4, 4),
    "model.audio_embed.weight": (4, 4),
    "multi_modal_projector.linear_1.weight": (4, 4),
    "model.multi_modal_projector.mm_soft_emb_norm.weight": (4,),
    "image_newline": (4,),
    "model.vision_tower.norm.weight": (4,),
    "encoder.layers.0.conv.norm.weight": (4,),
    "projector.qformer.layernorm.weight": (4,),
}


def write_multimodal(
    stories: Path, folder: Path, outer: str, inner: str = "model.", head: str = "lm_head."
) -> Path:
    """Write the stories260K checkpoint as the language model of a multimodal one; return `folder`.

    In the tensor names, the prefix `outer` replaces `inner`. `head` is the prefix of the output
    weight.
    """
    shutil.copytree(stories, folder)
    tensors = {
        outer + name.removeprefix(inner): values
        for name, values in tiny_checkpoint.read(stories / "model.safetensors").items()
    }
    tensors[head + "weight"] = tensors[f"{outer}embed_tokens.weight"] * 2
    tensors |= {name: np.ones(shape, np.float32) for name, shape in TOWERS.items()}
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    config = json.loads((stories / "config.json").read_text()) | {"tie_word_embeddings": False}
    multimodal_config = {
        "architectures": ["SeeingForConditionalGeneration"],
        "text_config": config,
        "vision_config": {},
    }
    (folder / "config.json").write_text(json.dumps(multimodal_config))
    return folder


def weights(source: write.Source) -> dict[str, bytes]:
    return {weight.name: weight.read(0, weight.rows).tobytes() for weight in source.weights}


@pytest.mark.parametrize(
    ("outer", "head"),
    [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")],
)
def test_language_part_is_converted_and_other_parts_are_named(
    outer: str, head: str, stories: Path, tmp_path: Path
) -> None:
    source = checkpoint_source.open_checkpoint(
        write_multimodal(stories, tmp_path / "seeing", outer, head=head)
    )
    note = next(note for note in source.notes if "language part" in note)
    assert f"{len(TOWERS)} tensors of" in note
    assert all(
        kind in note for kind in ("vision_tower", "visual", "audio_tower", "multi_modal_projector")
    )
    plain = weights(checkpoint_source.open_checkpoint(stories))
    converted = weights(source)
    assert converted.pop("output.weight")
    assert converted == plain


def test_tensor_of_an_unknown_part_is_refused(stories: Path, tmp_path: Path) -> None:
    folder = write_multimodal(
        stories, tmp_path / "seeing", "language_model.model.", head="language_model.lm_head."
    )
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    tiny_checkpoint.save(
        folder / "model.safetensors", tensors | {"touch_tower.weight": np.ones((2, 2), np.float32)}
    )
    with pytest.raises(UserError, match=r"touch_tower\.weight is unknown"):
        checkpoint_source.open_checkpoint(folder)


def test_two_tensors_of_one_name_are_refused(stories: Path, tmp_path: Path) -> None:
    folder = write_multimodal(
        stories, tmp_path / "seeing", "language_model.model.", head="language_model.lm_head."
    )
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    tiny_checkpoint.save(
        folder / "model.safetensors", tensors | {"model.norm.weight": np.ones(64, np.float32)}
    )
    with pytest.raises(UserError, match=r"two tensors for model\.norm\.weight"):
        checkpoint_source.open_checkpoint(folder)


def test_biases_of_zeros_that_a_family_does_not_have_are_left_out(
    stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "zeros")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    name = "model.layers.0.input_layernorm.bias"
    tiny_checkpoint.save(folder / "model.safetensors", tensors | {name: np.zeros(64, np.float32)})
    source = checkpoint_source.open_checkpoint(folder)
    assert any("1 biases are left out: this family has none" in note for note in source.notes)
    assert weights(source) == weights(checkpoint_source.open_checkpoint(stories))
    tiny_checkpoint.save(
        folder / "model.safetensors", tensors | {name: np.eye(1, 64, dtype=np.float32)[0]}
    )
    with pytest.raises(UserError, match=r"input_layernorm\.bias .*does not belong to this family"):
        checkpoint_source.open_checkpoint(folder)
