"""`llmcli bench header REF`: how long the header of a model file takes to read."""

import time
from typing import Annotated

import typer

from llmcli.commands.show import Json, start


def header(
    ref: Annotated[str, typer.Argument(metavar="REF", help="catalog name, org/repo or file")],
    json: Json = False,
) -> None:
    """Measure how long the header of a model file takes to read."""
    from llmcli.commands.ready import ready
    from quant import container

    config, ui = start(json)
    model = ready(ref, None, config, ui)
    started = time.perf_counter()
    container.read(model.path)
    milliseconds = (time.perf_counter() - started) * 1000
    if json:
        ui.result({"header_ms": milliseconds})
    else:
        ui.text(f"{milliseconds:.1f} ms")


BENCHES = (header,)
