"""`llmcli convert`: converts a checkpoint folder into a GGUF of floats or Q8_0. It uses the
functions of `llmcli quantize`.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from llmcli.commands.command_context import start_command
from llmcli.commands.completion import complete_models
from llmcli.commands.options.arguments import Json
from llmcli.commands.options.files import ConverterOptions, Offline, OutputOptions, SourceOptions
from llmcli.commands.options.groups import with_option_groups
from llmcli.model_loader.pickle_hint import pickle_hint
from llmcli.text_input import expand_path


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("convert")(with_option_groups(convert))


@pickle_hint()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            autocompletion=complete_models,
            help="A checkpoint folder, or a model's name.",
        ),
    ],
    *,
    outtype: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0"],
        typer.Option(help="Type of the matrices; auto: the type of the checkpoint's first matrix."),
    ] = "auto",
    reading: SourceOptions,
    conversion: ConverterOptions,
    writing: OutputOptions,
    offline: Offline = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint folder into a GGUF of floats or Q8_0."""
    from llmcli.commands.quantize.report import print_result
    from llmcli.model_loader import plan_notes, quantize_file
    from llmcli.workflows.quantization.quantize import QuantizeResult
    from quant.quantize.output_files import require_writable_file
    from quant.quantize.plan import plan_quantization
    from quant.quantize.write import is_finished

    config, ui = start_command(json, offline, reading.allow_pickle)
    model = quantize_file.find_convertible(source, conversion, config, ui, reading.keep_source)
    folder, blobs = (model.path, model.blobs) if model else (expand_path(source).absolute(), None)
    _require_folder(folder)
    with quantize_file.open_by_converter(folder, reading, conversion, config, ui, blobs) as opened:
        dtype = opened.source.dtype
        plan = plan_quantization(opened.source, dtype if outtype == "auto" else outtype)
        if outtype == "auto":
            ui.note(f"the file's matrices are {plan.file_type.name}, as in the checkpoint")
        plan_notes.print_plan_notes(plan, ui)
        with quantize_file.output_path(
            plan, model, writing.out, config, ui, is_custom=False, dry_run=writing.dry_run
        ) as target:
            report = None
            if not writing.dry_run:
                require_writable_file(plan.source, target, force=writing.force)
                if writing.force or not is_finished(plan, target):
                    opened.write_weights()
                report = quantize_file.write_with_progress(
                    plan, target, ui, threads=writing.threads, force=writing.force
                )
    print_result(QuantizeResult(plan, target, report, converter=opened.converter), ui)


def _require_folder(path: Path) -> None:
    """Raise UserError unless `path` is a folder. Its hint for a file is a quantize command that
    accepts the file.
    """
    from llmcli.errors import UserError

    if path.is_file():
        raise UserError(
            f"{path} is a file, but convert needs a checkpoint folder",
            hint=f"llmcli quantize {path} --type BF16",
        )
    if not path.exists():
        raise UserError(
            f"there is no folder {path}",
            hint="name a checkpoint folder, or a hub model as org/repo",
        )
