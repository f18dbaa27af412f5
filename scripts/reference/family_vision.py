"""Shared: tiny random checkpoints with a vision or audio part, as llama.cpp's converter and
llama-mtmd-cli take them; used by families.py.
"""

import io
import json
import struct
import wave
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.quant import families

PARTS = ("vision_config", "audio_config", "encoder_config")
SIDE = 64  # of the image, in pixels
# What the converter reads of every preprocessor_config.json
PREPROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@dataclass(frozen=True)
class Vision:
    """What a class needs besides the settings of its case.

    `settings` are merged into those of the case, and `preprocessor` into PREPROCESSOR. `tokens` are
    added to the tokenizer. `names` is that of Case. `reason` says why there is no checkpoint.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    reason: str = ""


# The converter knows the second matrix of a projector, number 2, only if there are three blocks.
PIXELS = {"min_pixels": 1024, "max_pixels": 4096}
THREE = {"vision_config": {"num_hidden_layers": 3}}
THREE_AUDIO = Vision({"audio_config": {"num_hidden_layers": 3}})
IMAGE_BREAKS = Vision(THREE | {"text_config": {"vocab_size": 513}}, tokens=("[IMG_BREAK]",))
CLASSES = {
    # Each side has two patches, which are not merged.
    "Gemma3ForConditionalGeneration": Vision(
        preprocessor={"image_seq_length": 4},
        names={"^vision_tower.": "vision_tower.vision_model."},
    ),
    "Gemma3nForConditionalGeneration": Vision(reason="transformers needs timm to build it"),
    # The converter looks for this token.
    "Glm4vForConditionalGeneration": Vision(tokens=("<|user|>",)),
    "GlmOcrForConditionalGeneration": Vision(tokens=("<|user|>",)),
    "Exaone4_5_ForConditionalGeneration": Vision(
        {"vision_config": {"depth": 3, "fullatt_block_indexes": [2]}}, PIXELS
    ),
    "HunYuanVLForConditionalGeneration": Vision(THREE, PIXELS),
    "Lfm2VlForConditionalGeneration": Vision(
        {"vision_config": {"num_hidden_layers": 3, "vision_use_head": False}},
        names={"^model.vision_tower.": "model.vision_tower.vision_model."},
    ),
    # The projector takes four patches of the width of a block.
    "Llama4ForConditionalGeneration": Vision(
        {"vision_config": {"num_hidden_layers": 3, "intermediate_size": 128}}
    ),
    "LlavaForConditionalGeneration": IMAGE_BREAKS,
    "Mistral3ForConditionalGeneration": IMAGE_BREAKS,
    # The last layer sees the whole image, the others a window.
    "MuseGlimmerForConditionalGeneration": Vision({"vision_config": {"num_hidden_layers": 2}}),
    "PaddleOCRVLForConditionalGeneration": Vision(
        {"vision_config": {"num_hidden_layers": 3, "architectures": ["PaddleOCRVisionModel"]}},
        PIXELS,
    ),
    "Qwen2AudioForConditionalGeneration": Vision({"audio_config": {"encoder_layers": 3}}),
    "Qwen2VLForConditionalGeneration": Vision({"vision_config": {"depth": 3}}),
    "Qwen2VLModel": Vision({"vision_config": {"depth": 3}}),
    "VoxtralForConditionalGeneration": THREE_AUDIO,
    "AudioFlamingo3ForConditionalGeneration": THREE_AUDIO,
    "Qwen2_5_VLForConditionalGeneration": Vision(
        {"vision_config": {"depth": 3, "fullatt_block_indexes": [2]}}
    ),
}


def has_part(case: families.Case) -> bool:
    """Return whether the class of a case has a vision or audio part."""
    model_class = getattr(transformers, case.hf, None)
    parts = model_class.config_class.sub_configs if model_class else ()
    return any(name in parts for name in PARTS)


def vision_of(case: families.Case) -> Vision:
    """Return what the class of a case needs."""
    return CLASSES.get(case.hf, Vision())


def reason_against(case: families.Case) -> str:
    """Return why there is no checkpoint of a case with its vision part, or an empty text."""
    return vision_of(case).reason


def change_case(case: families.Case) -> families.Case:
    """Return a case with what its vision part needs."""
    return replace(case, settings=merge(case.settings, vision_of(case).settings))


def complete_checkpoint(case: families.Case, folder: Path) -> None:
    """Change the files of a built checkpoint as its vision part needs it."""
    vision = vision_of(case)
    add_tokens(folder, vision.tokens)
    families.rename_tensors(folder, vision.names)
    values = PREPROCESSOR | vision.preprocessor
    (folder / "preprocessor_config.json").write_text(json.dumps(values))


def merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with changes, also in nested dictionaries."""
    result = dict(settings)
    for key, value in changes.items():
        is_nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if is_nested else value
    return result


def add_tokens(folder: Path, tokens: tuple[str, ...]) -> None:
    """Add special tokens to the tokenizer of a checkpoint, with the ids after the last one, unless it
    has them.
    """
    if not tokens:
        return
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    added = document["added_tokens"]
    first = 1 + max(*document["model"]["vocab"].values(), *(token["id"] for token in added))
    present = {token["content"] for token in added}
    for number, token in enumerate((token for token in tokens if token not in present), first):
        added.append(added[-1] | {"id": number, "content": token})
    file.write_text(json.dumps(document))


def input_of(case: families.Case) -> tuple[str, bytes]:
    """Return the option of llama-mtmd-cli for what the class of a case takes, and a file for it."""
    parts = getattr(transformers, case.hf).config_class.sub_configs
    return ("--image", encode_png()) if "vision_config" in parts else ("--audio", encode_wav())


def encode_wav(seconds: float = 1.0, rate: int = 16000) -> bytes:
    """Return a WAV file with a tone of 440 Hz."""
    samples = np.sin(2 * np.pi * 440 / rate * np.arange(int(seconds * rate)))
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes((samples * 20000).astype("<i2").tobytes())
    return file.getvalue()


def encode_png(side: int = SIDE) -> bytes:
    """Return a PNG of a square whose colors change from corner to corner."""
    rows = (
        b"\0"
        + bytes(color for x in range(side) for color in (255 * x // side, 255 * y // side, 99))
        for y in range(side)
    )
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(b"".join(rows)),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
