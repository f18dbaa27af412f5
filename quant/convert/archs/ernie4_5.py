"""Dense ERNIE 4.5: a Llama whose checkpoints already have interleaved rotary pairs.

Follows Ernie4_5Model of llama.cpp (conversion/ernie.py, src/models/ernie4-5.cpp).
"""

from dataclasses import replace

from quant.checkpoint.config import CheckpointConfig
from quant.convert.archs import llama
from quant.convert.parts import checks, metadata
from quant.convert.parts.base import no_tensors

DEFAULTS = {  # defaults of transformers' Ernie4_5Config
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


def check(config: CheckpointConfig) -> list[str]:
    """Raise UserError for settings that llama.cpp's ernie4_5 computes differently. Return
    no notes.
    """
    checks.raise_problems(
        config, [*checks.common_problems(config), checks.problem_biases(config, "use_bias")]
    )
    return []


ERNIE4_5 = replace(
    llama.LLAMA,
    name="ernie4_5",
    kind="ERNIE4_5",
    hf=("Ernie4_5ForCausalLM",),
    keys=metadata.common_keys,
    check=check,
    optional_shapes=no_tensors,
    extra_tensors=no_tensors,
    ops={},
    defaults=DEFAULTS,
)

ARCHS = (ERNIE4_5,)
