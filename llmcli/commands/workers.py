"""`--rpc` and `--tensor-split`, which every command with a model has: part of the model lies on other machines.

A worker that is lost ends the process: llama.cpp aborts, and what it was computing cannot be had back. That is told as
any other error of the world's; `serve` keeps its model in a process of its own for it.
"""

import math
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.errors import UserError

if TYPE_CHECKING:
    from llmcli.ui import UI

HELP_RPC = "part of the model lies on these workers (llmcli worker --rpc)"
HELP_SPLIT = "proportions of the layers: the workers' devices first, then the GPUs here [by free memory]"
Rpc = Annotated[str | None, typer.Option("--rpc", metavar="HOST:PORT,…", help=HELP_RPC[0].upper() + HELP_RPC[1:] + ".")]
Split = Annotated[
    str | None,
    typer.Option("-ts", "--tensor-split", metavar="N,N,…", help=HELP_SPLIT[0].upper() + HELP_SPLIT[1:] + "."),
]


def join(rpc: str | None, split: str | None, ui: "UI") -> None:
    """Use the workers that were named; raises UserError where one cannot be used, before any model is opened."""
    if rpc is None and split is None:
        return
    from llmcli.hardware import cluster
    from llmcli.runtime.binding import remote

    addresses = cluster.endpoints(rpc) if rpc is not None else ()
    cluster.join(addresses, _parts(split))
    if addresses:
        remote.on_loss(lambda: _lost(ui))


def _parts(text: str | None) -> list[float]:
    """ "3,1" -> [3.0, 1.0]; raises UserError."""
    if text is None:
        return []
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not parts or not all(math.isfinite(part) and part >= 0 for part in parts) or not any(parts):
        raise UserError(f"--tensor-split is {text!r}", hint="-ts takes proportions, such as 3,1")
    return parts


def _lost(ui: "UI") -> None:
    """Say which worker is gone and leave: the thread that waits for its answer cannot be woken."""
    from llmcli.hardware import cluster
    from llmcli.runtime.binding import remote

    addresses = list(remote.joined())
    where = " and ".join(cluster.gone(addresses) or addresses)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        ui.error(
            f"a worker was lost in the middle of it: {where}",
            hint="start it again there (llmcli worker --rpc), then the command; a chat goes on with --resume",
        )
        sys.stderr.flush()
    os._exit(1)
