"""`llmcli rerank`: ranks documents by queries."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

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


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("rerank")(with_option_groups(rerank))


def rerank(
    ref: Ref,
    files: Files = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT.jsonl", help="The output file."),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            "--query", metavar="TEXT", help="Rank all lines of the files, as documents, by it."
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="N", min=1, help="Write only the N best documents."),
    ] = None,
    return_documents: Annotated[
        bool, typer.Option("--return-documents", help="Write the texts of documents, too.")
    ] = False,
    text_format: TextFormat = "auto",
    field: Field = "text",
    pooling: Pooling = None,
    force: Force = False,
    json: Json = False,
    offline: Offline = False,
    trust: Trust = False,
    *,
    options: ModelOptions,
    placement_flags: PlacementGroup,
) -> None:
    """Rank documents by how well they answer a query.

    Each line is {"query": "...", "documents": ["...", ...]}. With --query, each line is a document.
    The same command resumes an interrupted run.
    """
    files, out = check_words("rerank", files, out, text_format, pooling)
    if query is None and (text_format == "text" or field != "text"):
        raise UsageError(
            "--format text and --field are for documents, and without --query a line has a query, too",
            hint="add --query TEXT",
        )
    if query is not None:
        require_utf8("--query", query)
    config, ui = start_command(json, offline, trust=trust)
    from llmcli.batch.scoring.open_model import open_scoring_model
    from llmcli.batch.scoring.rerank import RankRequest, rerank_files
    from llmcli.batch.scoring.text_files import open_text_files

    request = RankRequest(out, pooling, query, top, return_documents, field)
    line_format = "jsonl" if query is None else text_format
    with (
        open_text_files(files, line_format, out.parent) as source,
        open_scoring_model(ref, options, placement_flags, config, ui) as hosted,
    ):
        result = rerank_files(hosted, request, source, ui, force=force)
    print_result(
        result,
        ui,
        {"prompt_tokens": result.tokens},
        "score" if query is not None else "ranking",
        f"to see why: grep '\"error\":{{' {shlex.quote(str(out))}",
    )
