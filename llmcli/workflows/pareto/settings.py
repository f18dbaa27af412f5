"""The settings that are compared and how they are measured."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_TYPES = "Q2_K,Q3_K_M,Q4_K_M,Q5_K_M,Q6_K"


@dataclass(frozen=True, slots=True)
class ParetoSettings:
    """The settings to compare; lists are separated by commas.

    `types`: DEFAULT_TYPES if neither types nor sizes are named.
    """

    types: str | None = None
    target_size: str | None = None
    methods: str = "ggml"
    imatrix: Path | None = None
    moments: Path | None = None
    fold: list[str] | None = None


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """How the settings are evaluated and timed.

    - `text`: the text to evaluate on; None for the built-in text.
    - `ctx`: tokens of a chunk; `chunks`: number of chunks.
    - `threads`: 0 uses all cores.
    - `seconds`: measuring time of each of two speed tests; 0 for none.
    - `keep`: folder in which the model files are kept.
    - `fresh`: ignore what an earlier run finished.
    """

    text: Path | None = None
    ctx: int = 512
    chunks: int = 32
    threads: int = 0
    seconds: float = 4.0
    keep: Path | None = None
    fresh: bool = False
