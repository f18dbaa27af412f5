"""Options of `llmcli serve` for single endpoints. Most have the names of llama-server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.command_line import panels
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.config import Config

DEFAULT_PREFIX_SIZE = "8G"  # of all states in --cache-dir together
DEFAULT_FILES_SIZE = "4G"  # of all files of clients together

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


def check_slot_folder(folder: Path | None, has_replicas: bool) -> None:
    """Raise UsageError or UserError if the folder of --slot-save-path cannot be used."""
    if folder is None:
        return
    if has_replicas:
        raise UsageError(
            "--slot-save-path needs a single model, because each replica has its own slots",
            hint="leave out --replicas and --ray",
        )
    if not folder.is_dir():
        raise UserError(f"--slot-save-path {folder} is no folder", hint=f"mkdir -p '{folder}'")


def read_files_size(folder: Path | None, max_size: str | None, has_replicas: bool) -> int:
    """Return the bytes of --max-files-size. Raises UsageError or UserError if it is wrong, or if
    the folder of --files-folder cannot be used.
    """
    from llmcli.serve.batches.file_store import require_folder
    from quant.quantize.shards import parse_size

    n_bytes = parse_size(max_size or DEFAULT_FILES_SIZE, "--max-files-size", "all files")
    if folder is None and max_size is not None:
        raise UsageError(
            "--max-files-size applies only to --files-folder", hint="add --files-folder FOLDER"
        )
    if folder is not None and has_replicas:
        raise UsageError(
            "--files-folder needs a single model, because only one process can use the folder",
            hint="leave out --replicas and --ray",
        )
    if folder is not None:
        require_folder(folder)
    return n_bytes


def read_prefix_size(folder: str | None, max_size: str | None) -> int:
    """Return the bytes of --cache-dir-size. Raises UsageError if it is wrong."""
    from quant.quantize.shards import parse_size

    if folder is None and max_size is not None:
        raise UsageError(
            "--cache-dir-size applies only to --cache-dir", hint="add --cache-dir FOLDER"
        )
    return parse_size(max_size or DEFAULT_PREFIX_SIZE, "--cache-dir-size", "all states")


def find_prefix_folder(typed: str | None, config: "Config") -> Path | None:
    """Return the folder of --cache-dir, or None. Raises UserError if there is something else."""
    from llmcli.catalog.prefix_folders import default_folder

    if typed is None:
        return None
    folder = default_folder(config) if typed == "auto" else Path(typed).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--cache-dir {folder} is no folder", hint="name another one, or auto")
    return folder
