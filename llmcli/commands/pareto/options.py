"""The options of `pareto`: the settings to compare and how they are measured."""

from typing import Annotated

import typer

from llmcli.commands.options.groups import option_group
from llmcli.workflows.pareto.settings import DEFAULT_TYPES, MeasurementSettings, ParetoSettings
from quant.methods import METHODS

ParetoOptions = Annotated[
    ParetoSettings,
    option_group(
        types=typer.Option(
            metavar="TYPE,...", help=f"File types; default without sizes: {DEFAULT_TYPES}."
        ),
        target_size=typer.Option(
            metavar="SIZE,...",
            help="Target sizes; types are chosen as by quantize --target-size.",
        ),
        methods=typer.Option(
            metavar="NAME,...", help=f"How codes are chosen: {', '.join(METHODS)}."
        ),
        imatrix=typer.Option(
            metavar="FILE", help="Importance matrix for the rounding of every setting."
        ),
        moments=typer.Option(
            metavar="FILE",
            help="Second moments, for methods that need them; they include an imatrix. "
            "Missing statistics are collected from the built-in text, and kept.",
        ),
        fold=typer.Option(
            metavar="KINDS",
            help="Folds as in quantize, or none; repeatable: each is compared.",
        ),
    ),
]
MeasurementOptions = Annotated[
    MeasurementSettings,
    option_group(
        text=typer.Option(
            "--text",
            "-f",
            metavar="FILE",
            help="UTF-8 text to evaluate on; default: the built-in text.",
        ),
        ctx=typer.Option("--ctx", "-c", min=1, help="Chunk length in tokens."),
        chunks=typer.Option("--chunks", min=1, help="Number of chunks to evaluate."),
        threads=typer.Option("-t", "--threads", min=0, help="Threads; 0 uses all cores."),
        seconds=typer.Option(
            min=0, max=3600, help="Measuring time of each of two speed tests; 0: no tests."
        ),
        keep=typer.Option("--keep", metavar="DIR", help="Keep the model files in this folder."),
        fresh=typer.Option("--fresh", help="Redo everything, even what an earlier run finished."),
    ),
]
