"""`llmcli quantize`: defines the command line, runs the quantization workflow, and prints its
result.
"""

from difflib import get_close_matches
from typing import Annotated, Any

import typer

from llmcli.commands.command_line import panels
from llmcli.commands.command_line.command_app import PanelCommand
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import Json, Trust
from llmcli.commands.options.file_type import type_flags, with_type_flags
from llmcli.commands.options.files import ConverterOptions, Offline, OutputOptions, SourceOptions
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.quantize.options import (
    MethodOptions,
    SizeOptions,
    SplitMaxSize,
    TensorTypeOptions,
    VerifyOptions,
)
from llmcli.errors import UsageError
from llmcli.model_loader.pickle_hint import pickle_hint
from llmcli.ui import UI
from llmcli.workflows.quantization.quantize import DEFAULT_TYPE, QuantizeRequest, run_quantization


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize", cls=QuantizeCommand)(with_type_flags(with_option_groups(quantize)))


class QuantizeCommand(PanelCommand):
    """The command, whose option -t takes a file type as well as a number of threads."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. `-t` with the name of a file type becomes `--type`, with a note.
        Raises UsageError for `-t` with a word that is neither a number nor a type.
        """
        words = list(args[: args.index("--")] if "--" in args else args)
        flags = {flag for parameter in self.params for flag in parameter.opts}
        for index, word in enumerate(words):
            if word in flags - {"-t"}:  # such as -ts
                continue
            if word == "-t" and index + 1 < len(words):
                flag, value = "--type", words[index + 1]
            elif word.startswith("-t") and len(word) > 2:
                flag, value = f"--type={word[2:]}", word[2:]
            else:
                continue
            if _is_type(value):
                args = [*args[:index], flag, *args[index + 1 :]]
                UI().note(f"note: -t {value} is read as --type {value}; -t N are threads")
        return super().parse_args(ctx, args)


def _is_type(value: str) -> bool:
    """Return whether a value of `-t` is a file type; False for a number or another option. Raises
    UsageError, which suggests a type, for any other word.
    """
    types = type_flags()
    if value.lower() in types:
        return True
    if value.startswith("-") or value.lstrip("+-").isdigit():
        return False
    similar = get_close_matches(value.lower(), types, n=1)
    raise UsageError(
        f"-t is {value!r}: neither a number of threads nor a file type",
        hint=f"-t 8 sets the threads, --type {similar[0].upper() if similar else DEFAULT_TYPE} the type",
    )


@pickle_hint()
def quantize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            autocompletion=complete_models,
            help="A GGUF file, a checkpoint folder, or a model's name.",
        ),
    ],
    *,
    quant: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help=f"The file type, also taken by -t; default: {DEFAULT_TYPE}.",
            rich_help_panel=panels.TYPES,
        ),
    ] = None,
    method: MethodOptions,
    types: TensorTypeOptions,
    split_max_size: SplitMaxSize = None,
    size: SizeOptions,
    verification: VerifyOptions,
    reading: SourceOptions,
    conversion: ConverterOptions,
    output: OutputOptions,
    offline: Offline = False,
    trust: Trust = False,
    json: Json = False,
    placement_flags: PlacementGroup,
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
        placement_flags,
        conversion,
    )
    print_result(run_quantization(request, config, ui), ui)
