"""The language part of a checkpoint that also sees or hears: its tensors under the names of a text
model.

Towers and projectors are left out and said so. It knows beginnings of names, nothing else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quant.errors import Refusal
from quant.tensors import LazyTensor

# What stands at the beginning of the names of other parts, after an optional "model.".
OTHERS = re.compile(
    r"(?:model\.)?(?:vision_|visual\.|audio_|image_|video_|mm_|vit\.|vpm\.|apm\.|resampler\.|multi_modal_projector"
    r"|multimodal_projector|embed_vision\.|embed_audio\.|speech_|connector\.|mlp1\.)"
)
INNER = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)


@dataclass(frozen=True, slots=True)
class Spoken:
    """The tensors of the language part, and what the user should know of the rest."""

    tensors: dict[str, LazyTensor]
    notes: tuple[str, ...]


def part(folder: Path, stored: Mapping[str, LazyTensor]) -> Spoken:
    """The language part of a checkpoint; a text model comes back as it is."""
    if not any(OTHERS.match(name) or "language_model." in name for name in stored):
        return Spoken(dict(stored), ())
    found: dict[str, LazyTensor] = {}
    dropped: list[str] = []
    for name, tensor in stored.items():
        if OTHERS.match(name):
            dropped.append(name)
            continue
        inner = _inner(name)
        if inner in found:
            raise Refusal(
                f"{folder} has two tensors for {inner}: {found[inner].name} and {name}",
                hint="fetch the whole model again",
            )
        found[inner] = replace(tensor, name=inner)
    kinds = sorted({name.removeprefix("model.").split(".")[0] for name in dropped})
    note = f"only the language part is converted: {len(dropped)} tensors of {', '.join(kinds)} are left out"
    return Spoken(found, (note,) if dropped else ())


def _inner(name: str) -> str:
    for outer, inner in INNER:
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
