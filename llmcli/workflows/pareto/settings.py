"""The settings of `llmcli pareto`: which quantizations are compared, and how they are measured."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_TYPES = "Q2_K,Q3_K_M,Q4_K_M,Q5_K_M,Q6_K"


@dataclass(frozen=True, slots=True)
class ParetoSettings:
    """The quantizations to compare. `types`, `target_size` and `methods` are comma-separated lists;
    `fold` has one entry for each value of --fold.

    If neither `types` nor `target_size` is set, the types are DEFAULT_TYPES.
    """

    types: str | None = None
    target_size: str | None = None
    methods: str = "ggml"
    imatrix: Path | None = None
    moments: Path | None = None
    fold: list[str] | None = None


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """How each quantization is evaluated and timed.

    - `text`: the text to evaluate on; None: the built-in text.
    - `ctx`: tokens of a chunk; `chunks`: number of chunks.
    - `threads`: number of threads; 0: all cores.
    - `seconds`: duration of each of the two speed tests; 0: no tests.
    - `keep`: folder in which the model files stay; None: delete them.
    - `fresh`: ignore the results of an earlier run.
    """

    text: Path | None = None
    ctx: int = 512
    chunks: int = 32
    threads: int = 0
    seconds: float = 4.0
    keep: Path | None = None
    fresh: bool = False
