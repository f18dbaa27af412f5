"""--rpc and --tensor-split, as an option group for commands that do not have the run options."""

from typing import Annotated

import typer

from llmcli.commands import panels
from llmcli.commands.options.groups import option_group
from llmcli.model_loader.rpc_workers import RpcWorkers

HELP_RPC = "place part of the model on these workers (llmcli worker --rpc)"
HELP_SPLIT = (
    "proportions of the layers: the workers' devices first, then the local GPUs [by free memory]"
)

RpcOptions = Annotated[
    RpcWorkers,
    option_group(
        panels.SPEED,
        rpc=typer.Option(
            "--rpc", metavar="HOST:PORT,...", help=HELP_RPC[0].upper() + HELP_RPC[1:] + "."
        ),
        tensor_split=typer.Option(
            "-ts",
            "--tensor-split",
            metavar="N,N,...",
            help=HELP_SPLIT[0].upper() + HELP_SPLIT[1:] + ".",
        ),
    ),
]
