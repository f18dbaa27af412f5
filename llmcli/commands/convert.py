"""`llmcli convert`: a checkpoint folder into a GGUF of floats (or Q8_0), by the road that quantize takes.

It chooses the type and hands over; naming, placing, writing and telling are those of weights.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.commands.pickles import AllowPickle, offered
from llmcli.commands.show import start
from llmcli.commands.weights import KeepSource, Pre, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant.blob import Blob
    from quant.source import Source


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("convert")(convert)


@offered()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder, or a model's name.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT", help="The new file; NAME-TYPE.gguf beside SRC unless told."),
    ] = None,
    outtype: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0"],
        typer.Option(help="The type of the matrices; auto is what the checkpoint's first matrix is stored as."),
    ] = "auto",
    tokenizer: Tokenizer = None,
    pre: Pre = None,
    allow_pickle: AllowPickle = False,
    keep_source: KeepSource = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 takes all cores.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Make it anew although it is there.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Make a GGUF from a checkpoint folder, its weights as floats or Q8_0."""
    from llmcli.commands import weights
    from quant import quantize as road

    config, ui = start(json, offline, allow_pickle)
    model = weights.find_model(source, config, ui, keep_source)
    place, blobs = (model.path, model.blobs) if model else (Path(source).expanduser(), None)
    opened = _open(place, tokenizer, pre, allow_pickle, blobs)
    plan = road.plan(opened, opened.dtype if outtype == "auto" else outtype)
    if outtype == "auto":
        ui.note(f"the checkpoint's matrices are {plan.file_type.name}, and so are the file's")
    weights.tell(plan, ui)
    with weights.placed(plan, model, out, config, ui, mixed=False, dry_run=dry_run) as target:
        report = None if dry_run else weights.write(plan, target, ui, threads=threads, force=force)
    weights.close(plan, target, report, ui)


def _open(
    path: Path, tokenizer: Path | None, pre: str | None, allow_pickle: bool, blobs: "Mapping[str, Blob] | None"
) -> "Source":
    """The folder as a source; a file is refused with the command that takes it."""
    from llmcli.commands import weights
    from llmcli.errors import UserError

    if path.is_file():
        raise UserError(f"{path} is a file; convert takes a checkpoint folder", hint=f"llmcli quantize {path} -t BF16")
    if not path.exists():
        raise UserError(f"there is no folder {path}", hint="name a checkpoint folder, or a hub model as org/repo")
    return weights.open_source(path, tokenizer=tokenizer, pre=pre, allow_pickle=allow_pickle, blobs=blobs)
