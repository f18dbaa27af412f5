"""Qwen2-VL and Qwen2.5-VL: Qwen2 with rotary positions in sections (mrope), of which text needs
only one. The vision part is left out.

Follows Qwen2VLModel of llama.cpp (conversion/qwenvl.py, src/models/qwen2vl.cpp). The sections of
time, height and width follow each other, unlike those of Qwen3-VL, and cover all rotary pairs. llama.cpp
does not read the eps of this family's norms, and computes with 0: answers differ slightly.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs.qwen2 import QWEN2, problem_window
from quant.convert.archs.qwen3_vl import section_keys, sections, without_sections
from quant.convert.parts import checks, layout, metadata
from quant.convert.parts.base import ArchKey

SECTIONS = [16, 24, 24]


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen2vl computes differently; return a note
    about the eps of norms.
    """
    lengths, pairs = sections(config, SECTIONS), layout.head_counts(config)[2] // 2
    checks.raise_problems(
        config,
        [
            *checks.common_problems(without_sections(config)),
            problem_window(config),
            checks.problem_head_width(config),
            (
                sum(lengths[:3]) != pairs or any(lengths[3:]),
                f"the rotary sections {lengths} do not make {pairs} pairs",
            ),
        ],
    )
    eps = config.get_float("rms_norm_eps")
    return [f"llama.cpp computes the norms of this family with eps 0 instead of {eps:g}"]


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then that of the rotary sections."""
    return [*metadata.common_keys(config), *section_keys(config, SECTIONS)]


QWEN2VL = replace(
    QWEN2,
    name="qwen2vl",
    kind="QWEN2VL",
    hf=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    keys=keys,
    check=check,
    defaults={
        "sliding_window": 4096,
        "max_window_layers": 80,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
)

ARCHS = (QWEN2VL,)
