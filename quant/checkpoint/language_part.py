"""The language part of a multimodal checkpoint, under the tensor names of a text model.

Tensors of vision and audio parts and of projectors are left out, and a note tells the user.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quant.checkpoint.safetensors import LazyTensor
from quant.errors import UserError

# Beginnings of the names of tensors that do not belong to the language part.
OTHER_PART_NAMES = re.compile(
    r"(?:model\.)?(?:vision_|visual\.|audio_|image_|video_|mm_|vit\.|vpm\.|apm\.|resampler\."
    r"|multi_modal_projector|multimodal_projector|embed_vision\.|embed_audio\.|speech_"
    r"|connector\.|mlp1\.)"
)
# Those of parts beside a "language_model."; encoders have such names, too.
NEIGHBOR_NAMES = re.compile(r"(?:encoder|projector)\.")
LANGUAGE_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """The tensors of the language part under a text model's names, and notes for the user."""

    tensors: dict[str, LazyTensor]
    notes: tuple[str, ...]


def extract_language_part(folder: Path, stored: Mapping[str, LazyTensor]) -> LanguagePart:
    """Return the language part of the checkpoint `stored`. The tensors of a text model are returned
    unchanged.

    Raises UserError if two tensors would get the same name.
    """
    has_prefix = any("language_model." in name for name in stored)
    if not has_prefix and not any(OTHER_PART_NAMES.match(name) for name in stored):
        return LanguagePart(dict(stored), ())
    tensors: dict[str, LazyTensor] = {}
    omitted: list[str] = []
    for name, tensor in stored.items():
        if OTHER_PART_NAMES.match(name) or (has_prefix and NEIGHBOR_NAMES.match(name)):
            omitted.append(name)
            continue
        inner = _text_model_name(name)
        if inner in tensors:
            raise UserError(
                f"{folder} has two tensors for {inner}: {tensors[inner].name} and {name}",
                hint="fetch the whole model again",
            )
        tensors[inner] = replace(tensor, name=inner)
    omitted_parts = sorted({name.removeprefix("model.").split(".")[0] for name in omitted})
    note = (
        f"only the language part is converted: {len(omitted)} tensors of {', '.join(omitted_parts)} "
        "are left out; --mmproj makes a file of them, for llama-mtmd-cli"
    )
    return LanguagePart(tensors, (note,) if omitted else ())


def _text_model_name(name: str) -> str:
    """Return the name that a tensor has in a text model: "model.language_model.norm.weight" becomes
    "model.norm.weight".
    """
    for outer, inner in LANGUAGE_PREFIXES:
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
