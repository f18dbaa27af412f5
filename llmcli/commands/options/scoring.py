"""The options that embed and rerank share."""

from pathlib import Path
from typing import Annotated

import typer

from llmcli.batch.scoring.open_model import ScoringOptions
from llmcli.commands.command_line import panels
from llmcli.commands.options.groups import option_group
from llmcli.errors import UsageError

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="Files of lines; may be .gz; - is stdin."),
]
TextFormat = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="auto|jsonl|text",
        help="What a line is: JSON, or a text itself; auto: JSON in .jsonl files.",
    ),
]
Field = Annotated[
    str, typer.Option("--field", metavar="NAME", help="The field of a JSON object with the text.")
]
Force = Annotated[bool, typer.Option("--force", help="Start again even if results exist.")]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="OUT.jsonl", help="The output file.")
]
ModelOptions = Annotated[
    ScoringOptions,
    option_group(
        ctx_size=typer.Option(
            "-c",
            "--ctx-size",
            min=0,
            help="Tokens of the longest text; default: the model's, up to 8192.",
            rich_help_panel=panels.CONTEXT,
        ),
        threads=typer.Option(
            "-t", "--threads", help="Threads; default: the cores.", rich_help_panel=panels.SPEED
        ),
        gpu_layers=typer.Option(
            "-ngl",
            "--gpu-layers",
            metavar="N",
            help="Layers on the GPU: a number, all, auto.",
            rich_help_panel=panels.PLACEMENT,
        ),
        flash_attn=typer.Option(
            "-fa",
            "--flash-attn",
            metavar="MODE",
            help="Flash attention: on, off, auto.",
            rich_help_panel=panels.SPEED,
        ),
        cache_type_k=typer.Option(
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
            help="KV cache type of K; default f16.",
            rich_help_panel=panels.CONTEXT,
        ),
        cache_type_v=typer.Option(
            "-ctv",
            "--cache-type-v",
            metavar="TYPE",
            help="KV cache type of V; default f16.",
            rich_help_panel=panels.CONTEXT,
        ),
    ),
]


def check_format(text_format: str) -> None:
    """Raise UsageError for an unknown value of --format."""
    from llmcli.batch.scoring.text_files import FORMATS

    if text_format not in FORMATS:
        raise UsageError(
            f"--format is {text_format!r}", hint=f"--format takes {', '.join(FORMATS)}"
        )
