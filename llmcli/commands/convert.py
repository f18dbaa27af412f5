"""`llmcli convert`: converts a checkpoint folder into a GGUF of floats or Q8_0. It uses the
functions of `llmcli quantize`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmcli.commands.command_line import panels
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import Json
from llmcli.commands.options.files import ConverterOptions, Offline, OutputOptions, SourceOptions
from llmcli.commands.options.groups import with_option_groups
from llmcli.model_loader.pickle_hint import pickle_hint
from llmcli.model_loader.quantize_file import ConverterSettings, SourceSettings
from llmcli.text_input import expand_path


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("convert")(with_option_groups(convert))


@pickle_hint()
def convert(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SRC",
            autocompletion=complete_models,
            help="A checkpoint folder, or a model's name. With --lora: the model that the adapter "
            "changes, if the adapter does not name it. With --heads: the GGUF model that the heads were "
            "trained for.",
            show_default=False,
        ),
    ] = None,
    *,
    outtype: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0"],
        typer.Option(help="Type of the matrices; auto: the type of the checkpoint's first matrix."),
    ] = "auto",
    lora: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=panels.SOURCE,
            help="Convert the LoRA adapter in this folder instead, with llama.cpp's converter, to a "
            "GGUF adapter for llama-cli --lora.",
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=panels.SOURCE,
            help="Convert the draft heads in this folder instead (Medusa, blockwise), to a file for "
            "llmcli run -md.",
        ),
    ] = None,
    reading: SourceOptions,
    conversion: ConverterOptions,
    writing: OutputOptions,
    offline: Offline = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint folder into a GGUF of floats or Q8_0.

    With --lora, a LoRA adapter becomes a GGUF adapter. With --heads, draft heads become a file for
    -md.
    """
    from llmcli.commands.quantize.report import print_adapter, print_heads, print_result
    from llmcli.errors import UsageError
    from llmcli.model_loader import plan_notes, quantize_file
    from llmcli.model_loader.llama_converter import side_files
    from llmcli.workflows.quantization.convert_adapter import AdapterRequest, convert_adapter
    from llmcli.workflows.quantization.convert_heads import HeadsRequest, convert_heads
    from llmcli.workflows.quantization.quantize import QuantizeResult
    from quant.quantize.output_files import require_writable_file
    from quant.quantize.plan import plan_quantization
    from quant.quantize.write import is_finished

    config, ui = start_command(json, offline, reading.allow_pickle)
    if lora is not None and heads is not None:
        raise UsageError(
            "--lora and --heads convert different things", hint="leave out one of them"
        )
    if heads is not None:
        _require_no_other_option("--heads", reading, conversion, ("auto",))
        wanted = HeadsRequest(heads, source, outtype, reading.allow_pickle, writing)
        print_heads(convert_heads(wanted, config, ui), ui)
        return
    if lora is not None:
        _require_no_other_option("--lora", reading, conversion, ("auto", "llama.cpp"))
        request = AdapterRequest(lora, source, outtype, reading.allow_pickle, writing)
        print_adapter(convert_adapter(request, config, ui), ui)
        return
    if source is None:
        raise UsageError("convert needs a checkpoint", hint="llmcli convert FOLDER")
    model = quantize_file.find_convertible(source, conversion, config, ui, reading.keep_source)
    folder, blobs = (model.path, model.blobs) if model else (expand_path(source).absolute(), None)
    _require_folder(folder)
    if conversion.mmproj:
        side_files.check_mmproj(folder, config, ui)
    with quantize_file.open_by_converter(folder, reading, conversion, config, ui, blobs) as opened:
        dtype = opened.source.dtype
        plan = plan_quantization(opened.source, dtype if outtype == "auto" else outtype)
        if outtype == "auto":
            ui.note(f"the file's matrices are {plan.file_type.name}, as in the checkpoint")
        plan_notes.print_plan_notes(plan, ui)
        with quantize_file.output_path(
            plan, model, writing.out, config, ui, is_custom=False, dry_run=writing.dry_run
        ) as target:
            if not writing.dry_run:
                require_writable_file(plan.source.files, target, force=writing.force)
            mmproj = (
                side_files.write_mmproj(
                    folder,
                    target,
                    plan.source.name,
                    config,
                    ui,
                    force=writing.force,
                    dry_run=writing.dry_run,
                )
                if conversion.mmproj
                else None
            )
            report = None
            if not writing.dry_run:
                if writing.force or not is_finished(plan, target):
                    opened.write_weights()
                report = quantize_file.write_with_progress(
                    plan, target, ui, threads=writing.threads, force=writing.force
                )
    result = QuantizeResult(plan, target, report, converter=opened.converter, mmproj=mmproj)
    print_result(result, ui)


def _require_no_other_option(
    kind: str,
    reading: SourceSettings,
    conversion: ConverterSettings,
    converters: Sequence[str],
) -> None:
    """Raise UsageError for an option that does not apply to --lora or --heads, which `kind` is.
    `converters`: the values of --converter that do.
    """
    from llmcli.errors import UsageError

    flags = {
        **reading.flags,
        "--allow-pickle": False,  # this one does
        "--keep-source": reading.keep_source,
        "--mmproj": conversion.mmproj,
        f"--converter {conversion.converter}": conversion.converter not in converters,
    }
    if flag := next((name for name, value in flags.items() if value), None):
        raise UsageError(f"{flag} does not apply to {kind}", hint=f"leave out {flag}")


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
