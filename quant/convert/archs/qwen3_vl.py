"""Qwen3-VL, the dense models: Qwen3 with rotary positions in sections (mrope), of which text needs
only one. The vision part is left out.

Follows Qwen3VLTextModel of llama.cpp (conversion/qwen3vl.py, src/models/qwen3vl.cpp). Sections are
interleaved: rotary pair i is a pair of time, height or width by i modulo 3, as long as the section
has pairs. transformers treats all other pairs as pairs of time. llama.cpp treats those whose number
modulo 3 is not 0 as pairs of a fourth position, which is 0 for text. These are the slowest pairs,
so the difference is tiny.
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs.qwen3 import QWEN3
from quant.convert.parts import checks, layout, metadata, rope
from quant.convert.parts.base import ArchKey
from quant.errors import UserError

SECTIONS = [24, 20, 20]
SECTIONS_SETTING = "mrope_section"
# Angle in radians, at the end of the context, from which pairs that llama.cpp does not rotate matter
MAX_ANGLE = 0.5
MAX_PAIRS = 1 << 12  # more than any head has
DEEPSTACK_DEFAULT = 3  # len(deepstack_visual_indexes) that transformers assumes


def sections(config: CheckpointConfig, default: list[int]) -> list[int]:
    """Return the numbers of rotary pairs of time, height and width. Raises UserError if they are
    malformed.
    """
    value = rope.rope_settings(config).values.get(SECTIONS_SETTING, default)
    if (
        not isinstance(value, list)
        or len(value) not in (3, 4)
        or any(type(count) is not int or not 0 <= count < 1 << 16 for count in value)
        or not sum(value)
    ):
        raise UserError(
            f"{config.location}: {SECTIONS_SETTING} should have three numbers, not {value!r}",
            hint="fetch it again",
        )
    return value


def without_sections(config: CheckpointConfig) -> CheckpointConfig:
    """Return the config without rotary sections, which common_problems() of checks.py refuses."""
    values = dict(config.values)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(settings := values.get(key), dict):
            values[key] = {
                name: "default" if value == "mrope" and name in ("type", "rope_type") else value
                for name, value in settings.items()
                if name != SECTIONS_SETTING
            }
    return replace(config, values=values)


def section_problems(
    config: CheckpointConfig, default: list[int], *, allow_partial_rotary: bool = False
) -> list[tuple[object, str]]:
    """Return the problems (see checks.py) of settings that llama.cpp does not support in families
    with rotary sections. `default` are the sections if the config has none.
    """
    lengths, pairs = sections(config, default), rope.rotary_width(config) // 2
    return [
        *checks.common_problems(
            without_sections(config), allow_partial_rotary=allow_partial_rotary
        ),
        (
            sum(lengths) > 2 * pairs or any(lengths[3:]),
            f"the rotary sections {lengths} do not fit {pairs} pairs",
        ),
        (
            _lost_angle(config, default) > MAX_ANGLE,
            f"llama.cpp assigns some of its {pairs} rotary pairs to other sections",
        ),
    ]


def _lost_angle(config: CheckpointConfig, default: list[int]) -> float:
    """Return the largest angle in radians, at the end of the context, of a rotary pair to which
    llama.cpp does not give the position that transformers gives it; 0 if there is no such pair.
    """
    lengths, pairs = sections(config, default), rope.rotary_width(config) // 2
    base = rope.rope_settings(config).get_float("rope_theta")
    lost = [
        pair
        for pair in range(min(pairs, MAX_PAIRS))
        if _axis(pair, lengths) != _axis_in_llama(pair, lengths)
    ]
    if not lost:
        return 0.0
    angle: float = config.get_int("max_position_embeddings") * base ** (-min(lost) / pairs)
    return angle


def _axis(pair: int, lengths: list[int]) -> int:
    """Return the axis of a rotary pair in transformers: 0 time, 1 height, 2 width."""
    return pair % 3 if pair < 3 * lengths[pair % 3] else 0


def _axis_in_llama(pair: int, lengths: list[int]) -> int:
    """Return the axis of a rotary pair in llama.cpp (ggml_mrope_cache_init). 3 is the fourth axis,
    whose position is 0 for text.
    """
    sector = pair % sum(lengths)
    return sector % 3 if sector < 3 * lengths[sector % 3] else 3


def section_notes(config: CheckpointConfig, default: list[int]) -> list[str]:
    """Return a note if llama.cpp does not rotate some pairs."""
    angle = _lost_angle(config, default)
    if not angle:
        return []
    return [
        "llama.cpp does not rotate the slowest rotary pairs of this model; at the end of the "
        f"context their angle is {angle:.2g} radians"
    ]


def section_keys(config: CheckpointConfig, default: list[int]) -> list[ArchKey]:
    """Return the metadata key of the rotary sections. llama.cpp requires four numbers."""
    lengths = [*sections(config, default), 0][:4]
    return [ArchKey("rope.dimension_sections", "array:int32", lengths)]


def deepstack_count(config: CheckpointConfig) -> int:
    """Return the number of layers to whose input the vision part adds features. Raises UserError if
    the setting is malformed.
    """
    vision = config.values.get("vision_config")
    if not isinstance(vision, dict):
        return 0
    indexes = vision.get("deepstack_visual_indexes", [0] * DEEPSTACK_DEFAULT)
    if not isinstance(indexes, list) or len(indexes) > layout.layer_count(config):
        raise UserError(
            f"{config.location}: deepstack_visual_indexes is {indexes!r}, not a list of layers",
            hint="fetch it again",
        )
    return len(indexes)


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's qwen3vl computes differently; return notes for
    the user.
    """
    checks.raise_problems(
        config,
        [
            *section_problems(config, SECTIONS),
            checks.problem_biases(config, "attention_bias"),
        ],
    )
    deepstack_count(config)
    return section_notes(config, SECTIONS)


def keys(config: CheckpointConfig) -> list[ArchKey]:
    """Return the common metadata keys, then those of the rotary sections and the vision part."""
    return [
        *metadata.common_keys(config),
        *section_keys(config, SECTIONS),
        ArchKey("n_deepstack_layers", "uint32", deepstack_count(config)),
    ]


QWEN3VL = replace(
    QWEN3,
    name="qwen3vl",
    kind="QWEN3VL",
    hf=("Qwen3VLForConditionalGeneration",),
    keys=keys,
    check=check,
    defaults={"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 128000},
)

ARCHS = (QWEN3VL,)
