"""Nomic BERT: an encoder with rotary positions, in the spelling of transformers or Nomic's own."""

from typing import Any

from quant.convert.archs.nomic_bert import FIXED_SETTINGS, OLD_SETTINGS
from tests.quant.families import Case

ENCODER = {
    "num_key_value_heads": None,
    "head_dim": None,
    "pad_token_id": 0,
    "layer_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}


def old_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config with both spellings, of which Nomic's own is read."""
    del values["rope_parameters"]
    old = {old: values[new] for old, new in OLD_SETTINGS.items() if new in values}
    fixed = FIXED_SETTINGS
    lengths = {"n_positions": 8192, "max_trained_positions": 2048}
    return values | old | dict(fixed) | lengths | {"rotary_emb_base": 1000}


CASES = [
    Case("nomic-bert", "NomicBertModel", ENCODER, original=False, output="vectors"),
    Case(
        "nomic-bert, old spelling, one matrix",
        "NomicBertModel",
        ENCODER,
        config=old_spelling,
        output="vectors",
    ),
    Case(
        "nomic-bert, other base",
        "NomicBertModel",
        ENCODER | {"rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}},
        output="vectors",
    ),
]
