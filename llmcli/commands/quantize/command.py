"""`llmcli quantize`: defines the command line, runs the quantization workflow, and prints its
result.
"""

from typing import Annotated

import typer

from llmcli.commands import panels
from llmcli.commands.command_context import start_command
from llmcli.commands.options.arguments import Json, Trust
from llmcli.commands.options.file_type import with_type_flags
from llmcli.commands.options.files import Offline, OutputOptions, SourceOptions
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.rpc import RpcOptions
from llmcli.commands.quantize.options import (
    MethodOptions,
    SizeOptions,
    SplitMaxSize,
    TensorTypeOptions,
    VerifyOptions,
)
from llmcli.model_loader.pickle_hint import pickle_hint
from llmcli.workflows.quantization.quantize import DEFAULT_TYPE, QuantizeRequest, run_quantization


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize")(with_type_flags(with_option_groups(quantize)))


@pickle_hint()
def quantize(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A GGUF file, a checkpoint folder, or a model's name."),
    ],
    *,
    quant: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--type",
            metavar="TYPE",
            help=f"The file type; default: {DEFAULT_TYPE}.",
            rich_help_panel=panels.TYPES,
        ),
    ] = None,
    method: MethodOptions,
    types: TensorTypeOptions,
    split_max_size: SplitMaxSize = None,
    size: SizeOptions,
    verification: VerifyOptions,
    reading: SourceOptions,
    output: OutputOptions,
    offline: Offline = False,
    trust: Trust = False,
    json: Json = False,
    workers: RpcOptions,
) -> None:
    """Quantize a checkpoint folder or a GGUF.

    The new GGUF is written in one pass, on all cores.
    """
    from llmcli.commands.quantize.report import print_result

    config, ui = start_command(json, offline, reading.allow_pickle, trust)
    request = QuantizeRequest(
        source,
        quant,
        method,
        types,
        split_max_size,
        size,
        verification,
        reading,
        output,
        workers,
    )
    print_result(run_quantization(request, config, ui), ui)
