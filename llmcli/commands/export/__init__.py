"""`llmcli export`, a group of subcommands. Each module of this folder exports its subcommands as
EXPORTS; the function's name is the subcommand's name.
"""

import typer

from llmcli.commands.command_line.command_app import CommandApp
from llmcli.commands.options.run import RunCommand
from quant.registry import collect


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    exports = CommandApp(
        no_args_is_help=True, help="Write what another engine needs to run the same model."
    )
    for name, command in collect("llmcli.commands.export", "EXPORTS", "__name__").items():
        exports.command(name, cls=RunCommand)(command)
    app.add_typer(exports, name="export")
