"""ParetoSettings, ParetoMeasurement."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quant.methods import METHODS

DEFAULT_TYPES = "Q2_K,Q3_K_M,Q4_K_M,Q5_K_M,Q6_K"


@dataclass(frozen=True, slots=True)
class ParetoSettings:
    """The settings to compare."""

    types: Annotated[
        str | None,
        typer.Option(metavar="TYPE,…", help=f"File types; default without sizes: {DEFAULT_TYPES}."),
    ] = None
    target_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,…",
            help="Target sizes; types are chosen as by quantize --target-size.",
        ),
    ] = None
    methods: Annotated[
        str, typer.Option(metavar="NAME,…", help=f"How codes are chosen: {', '.join(METHODS)}.")
    ] = "ggml"
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Importance matrix for the rounding of every setting."),
    ] = None
    moments: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Second moments, for methods that need them; they include an imatrix. "
            "Missing statistics are collected from the built-in text, and kept.",
        ),
    ] = None
    fold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KINDS",
            help="Folds as in quantize, or none; repeatable: each is compared.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """How the settings are evaluated and timed."""

    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            "-f",
            metavar="FILE",
            help="UTF-8 text to evaluate on; default: the built-in text.",
        ),
    ] = None
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=1, help="Chunk length in tokens.")] = 512
    chunks: Annotated[
        int, typer.Option("--chunks", min=1, help="Number of chunks to evaluate.")
    ] = 32
    threads: Annotated[
        int, typer.Option("-t", "--threads", min=0, help="Threads; 0 uses all cores.")
    ] = 0
    seconds: Annotated[
        float,
        typer.Option(
            min=0, max=3600, help="Measuring time of each of two speed tests; 0: no tests."
        ),
    ] = 4.0
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep the model files in this folder."),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Redo everything, even what an earlier run finished.")
    ] = False
