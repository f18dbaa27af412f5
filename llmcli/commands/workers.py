"""`--rpc` and `--tensor-split`, which every command that runs a model has: part of it lies on other
machines.

A worker that is lost ends the process: llama.cpp aborts, and what it was computing cannot be had
back. That is told as any other error of the world's; `serve` keeps its model in a process of its
own for it.
"""

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli import terminal
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.ui import UI

SHOWN = "\x1b[0m\x1b[?25h\n"  # plain, with a cursor, on a line of its own
HELP_RPC = "part of the model lies on these workers (llmcli worker --rpc)"
HELP_SPLIT = (
    "proportions of the layers: the workers' devices first, then the GPUs here [by free memory]"
)


@dataclass(frozen=True, slots=True)
class Workers:
    """The same as a group of options (grouped.py), for commands without the run options' table."""

    rpc: Annotated[
        str | None,
        typer.Option("--rpc", metavar="HOST:PORT,…", help=HELP_RPC[0].upper() + HELP_RPC[1:] + "."),
    ] = None
    tensor_split: Annotated[
        str | None,
        typer.Option(
            "-ts",
            "--tensor-split",
            metavar="N,N,…",
            help=HELP_SPLIT[0].upper() + HELP_SPLIT[1:] + ".",
        ),
    ] = None

    def join(self, ui: "UI", runs: bool = True) -> None:
        """As `join` does; raises UsageError where they are named and nothing `runs` on them."""
        if not runs and (self.rpc is not None or self.tensor_split is not None):
            raise UsageError("nothing of this runs on a worker", hint="leave out --rpc and -ts")
        join(self.rpc, self.tensor_split, ui)


def join(rpc: str | None, split: str | None, ui: "UI") -> None:
    """Use the workers that were named; raises UserError where one cannot be used, before any model
    is opened.
    """
    if rpc is None and split is None:
        return
    from llmcli.hardware import cluster
    from llmcli.runtime.binding import remote

    addresses = cluster.endpoints(rpc) if rpc is not None else ()
    cluster.join(addresses, _parts(split))
    if addresses:
        remote.on_loss(partial(_lost, terminal.settings(), ui))


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


def _lost(before: list[Any] | None, ui: "UI") -> None:
    """Say which worker is gone and leave: the thread that waits for its answer cannot be woken.

    The terminal is left as it was found: who was writing there, with its echo off or the cursor
    hidden, ends with us.
    """
    from llmcli.hardware import cluster
    from llmcli.runtime.binding import remote

    addresses = list(remote.joined())
    where = " and ".join(cluster.gone(addresses) or addresses)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        if before is not None:
            terminal.restore(before)
        if sys.stderr.isatty():
            sys.stderr.write(SHOWN)
        ui.error(
            f"a worker was lost in the middle of it: {where}",
            hint="start it again there (llmcli worker --rpc), then the command; a chat goes on with --resume",
        )
        sys.stderr.flush()
    os._exit(1)
