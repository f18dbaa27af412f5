"""Options of `llmcli serve` for single endpoints. Most have the names of llama-server."""

from pathlib import Path
from typing import Annotated

import typer

from llmcli.commands.command_line import panels

Metrics = Annotated[
    bool,
    typer.Option(
        "--metrics/--no-metrics",
        help="Serve /metrics.",
        rich_help_panel=panels.NETWORK,
    ),
]
Slots = Annotated[
    bool,
    typer.Option(
        "--slots/--no-slots",
        help="Serve /slots.",
        rich_help_panel=panels.NETWORK,
    ),
]
Page = Annotated[
    bool,
    typer.Option(
        "--ui/--no-ui",
        help="Serve the chat page.",
        rich_help_panel=panels.NETWORK,
    ),
]
DropNonces = Annotated[
    bool,
    typer.Option(
        "--drop-nonces/--keep-nonces",
        help="Leave out what agents change in each request (Claude Code's billing header), so that "
        "their prompts stay in the cache.",
        rich_help_panel=panels.REQUESTS,
    ),
]
SlotSavePath = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Let clients save the cache of a slot to a file here, and restore it.",
        rich_help_panel=panels.REQUESTS,
    ),
]
FilesFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Serve /v1/files and /v1/batches, and keep their files here.",
        rich_help_panel=panels.REQUESTS,
    ),
]
MaxFilesSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Maximum size of all files in --files-folder together, such as 500M. [4G]",
        rich_help_panel=panels.REQUESTS,
    ),
]
PrefixFolder = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="FOLDER",
        help="Keep the states of finished answers on disk here, so that they outlive a restart; "
        "auto: in llmcli's cache. They reveal conversations.",
        rich_help_panel=panels.REQUESTS,
    ),
]
PrefixFolderSize = Annotated[
    str | None,
    typer.Option(
        "--cache-dir-size",
        metavar="SIZE",
        help="Maximum size of all states in --cache-dir together, such as 20G. [8G]",
        rich_help_panel=panels.REQUESTS,
    ),
]
ContextShift = Annotated[
    bool,
    typer.Option(
        "--context-shift/--no-context-shift",
        help="When the context of an answer is full, drop its oldest tokens and go on.",
        rich_help_panel=panels.REQUESTS,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Answers also have the text of their prompt, in __verbose.",
        rich_help_panel=panels.REQUESTS,
    ),
]
ContextPerSlot = Annotated[
    int | None,
    typer.Option(
        "--kv-unified-per-slot",
        min=16,
        metavar="N",
        help="Maximum number of tokens of a prompt and its answer, of those of --ctx-size.",
        rich_help_panel=panels.REQUESTS,
    ),
]
