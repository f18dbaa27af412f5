"""`llmcli embed`: one vector for each line of some files."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from llmcli.batch.output_file import require_output
from llmcli.commands.batch_result import print_result
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Json, Ref, Trust
from llmcli.commands.options.files import Offline
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.pooling import Pooling
from llmcli.commands.options.scoring import (
    Field,
    Files,
    Force,
    ModelOptions,
    TextFormat,
    check_words,
)
from llmcli.errors import UsageError
from llmcli.text_input import require_utf8

DEFAULT_NORM = 2


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("embed")(with_option_groups(embed))


def embed(
    ref: Ref,
    files: Files = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT", help="The output file: .npy, or else JSONL."),
    ] = None,
    text_format: TextFormat = "auto",
    field: Field = "text",
    prompt: Annotated[
        str,
        typer.Option("--prompt", metavar="TEXT", help="Text before each text, such as 'query: '."),
    ] = "",
    pooling: Pooling = None,
    norm: Annotated[
        int | None,
        typer.Option(
            "--embd-normalize",
            metavar="N",
            min=-1,
            max=100,
            help="Scale vectors: 2 to length 1, -1 not at all, 0 to the largest int16, another N to "
            "p-norm 1; default 2.",
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            "--dimensions",
            metavar="N",
            min=1,
            help="Keep the first N values, scaled to length 1 (Matryoshka).",
        ),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Cut off the end of a text that is too long."),
    ] = False,
    force: Force = False,
    json: Json = False,
    offline: Offline = False,
    trust: Trust = False,
    *,
    options: ModelOptions,
    placement_flags: PlacementGroup,
) -> None:
    """Compute a vector for each line of some files.

    The same command resumes an interrupted run.
    """
    files, out = check_words("embed", files, out, text_format, pooling)
    require_utf8("--prompt", prompt)
    if dimensions is not None and norm not in (None, DEFAULT_NORM):
        raise UsageError(
            "--dimensions scales vectors to length 1, and --embd-normalize otherwise",
            hint="leave out one of them",
        )
    config, ui = start_command(json, offline, trust=trust)
    from llmcli.batch.scoring.embed import EmbedRequest, embed_files
    from llmcli.batch.scoring.npy_file import about_path
    from llmcli.batch.scoring.open_model import open_scoring_model
    from llmcli.batch.scoring.text_files import open_text_files

    request = EmbedRequest(
        out, pooling, DEFAULT_NORM if norm is None else norm, dimensions, prompt, field, truncate
    )
    if request.writes_npy:
        require_output(about_path(out), files)
    with (
        open_text_files(files, text_format, out.parent) as source,
        open_scoring_model(ref, options, placement_flags, config, ui) as hosted,
    ):
        result = embed_files(hosted, request, source, ui, force=force)
    print_result(
        result,
        ui,
        {"prompt_tokens": result.tokens},
        "vector",
        f"see errors in {shlex.quote(str(about_path(out)))}"
        if request.writes_npy
        else f"to see why: grep '\"error\":{{' {shlex.quote(str(out))}",
    )
