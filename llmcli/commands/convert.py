"""`llmcli convert`: converts a checkpoint folder into a GGUF of floats or Q8_0, with the functions
of quantize.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.commands.grouped import grouped
from llmcli.commands.pickles import offered
from llmcli.commands.show import start
from llmcli.commands.writing import Reading, Writing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant.blob import Blob
    from quant.source import Source


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("convert")(grouped(convert))


@offered()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint folder, or a model's name.")
    ],
    *,
    outtype: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0"],
        typer.Option(help="Type of the matrices; auto: the type of the checkpoint's first matrix."),
    ] = "auto",
    reading: Reading,
    writing: Writing,
) -> None:
    """Convert a checkpoint folder into a GGUF of floats or Q8_0."""
    from llmcli.commands import closing, weights
    from quant import quantize as road

    config, ui = start(writing.json, writing.offline, reading.allow_pickle)
    model = weights.find_model(source, config, ui, reading.keep_source)
    folder, blobs = (model.path, model.blobs) if model else (Path(source).expanduser(), None)
    checkpoint = _open_checkpoint(folder, reading, blobs)
    plan = road.plan(checkpoint, checkpoint.dtype if outtype == "auto" else outtype)
    if outtype == "auto":
        ui.note(f"the file's matrices are {plan.file_type.name}, as in the checkpoint")
    closing.tell(plan, ui)
    with weights.placed(
        plan, model, writing.out, config, ui, mixed=False, dry_run=writing.dry_run
    ) as target:
        report = (
            None
            if writing.dry_run
            else weights.write(plan, target, ui, threads=writing.threads, force=writing.force)
        )
    closing.close(plan, target, report, ui)


def _open_checkpoint(path: Path, reading: Reading, blobs: "Mapping[str, Blob] | None") -> "Source":
    """Open the folder as a source; raises UserError for a file, with the command that accepts
    it.
    """
    from llmcli.commands import weights
    from llmcli.errors import UserError

    if path.is_file():
        raise UserError(
            f"{path} is a file, but convert needs a checkpoint folder",
            hint=f"llmcli quantize {path} -t BF16",
        )
    if not path.exists():
        raise UserError(
            f"there is no folder {path}",
            hint="name a checkpoint folder, or a hub model as org/repo",
        )
    return weights.open_source(
        path,
        tokenizer=reading.tokenizer,
        pre=reading.pre,
        allow_pickle=reading.allow_pickle,
        blobs=blobs,
    )
