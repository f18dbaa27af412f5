"""The options that quantize and convert share: how the source is read and where the file goes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmcli.commands.options.pickle import AllowPickle

KeepSource = Annotated[
    bool,
    typer.Option(
        "--keep-source",
        help="Download a checkpoint whole and keep it, instead of streaming it once.",
    ),
]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a source is read."""

    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="DIR", help="Read the tokenizer's files from another folder."
        ),
    ] = None
    pre: Annotated[
        str | None,
        typer.Option(
            "--pre",
            metavar="NAME",
            help="llama.cpp's name of the pre-tokenizer, if it is not recognized.",
        ),
    ] = None
    allow_pickle: AllowPickle = False
    keep_source: KeepSource = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the new file is written, and what is printed about it."""

    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            help="The new file; default: NAME-TYPE.gguf next to SRC.",
        ),
    ] = None
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 uses all cores.")] = 0
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")
    ] = False
    force: Annotated[
        bool, typer.Option("--force", help="Write the file even if it is up to date.")
    ] = False
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
