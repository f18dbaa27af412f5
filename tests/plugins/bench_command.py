"""`llmcli bench header REF`: the time to read the header of a model file."""

import time
from typing import Annotated

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Json


def header(
    ref: Annotated[str, typer.Argument(metavar="REF", help="catalog name, org/repo or file")],
    json: Json = False,
) -> None:
    """Measure the time to read the header of a model file."""
    from llmcli.model_loader.prepare import prepare_model
    from quant.model_file import read_header

    config, ui = start_command(json)
    model = prepare_model(ref, None, config, ui)
    started = time.perf_counter()
    read_header.read_header(model.path)
    milliseconds = (time.perf_counter() - started) * 1000
    if json:
        ui.result({"header_ms": milliseconds})
    else:
        ui.text(f"{milliseconds:.1f} ms")


BENCHES = (header,)
