"""The options that every command has which writes a model file: how the source is read, where the
file goes.

They stand here once, for quantize and convert. It knows words, no files.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmcli.commands.pickles import AllowPickle

KeepSource = Annotated[
    bool,
    typer.Option(
        "--keep-source", help="Download a checkpoint whole and keep it, instead of reading it once."
    ),
]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is read."""

    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="DIR", help="Take the tokenizer's files from another folder."
        ),
    ] = None
    pre: Annotated[
        str | None,
        typer.Option(
            "--pre",
            metavar="NAME",
            help="llama.cpp's name of the pre-tokenizer, where it is not known.",
        ),
    ] = None
    allow_pickle: AllowPickle = False
    keep_source: KeepSource = False


@dataclass(frozen=True, slots=True)
class Writing:
    """How the new file is written, and what is said of it."""

    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            help="The new file; NAME-TYPE.gguf beside SRC unless told.",
        ),
    ] = None
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 takes all cores.")] = 0
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Make it anew although it is there.")] = (
        False
    )
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
