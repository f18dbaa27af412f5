"""The command line: every command by name. A command's module is imported when it is first
needed.
"""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from llmcli import __version__

# in the order of --help: the modules of this folder and the commands that each registers
COMMANDS_OF_MODULE = {
    "models": ("pull", "list", "rm", "gc", "alias"),
    "show": ("show",),
    "diff": ("diff",),
    "convert": ("convert",),
    "quantize.command": ("quantize",),
    "chat.command": ("chat", "run"),
    "serve": ("serve",),
    "plan.command": ("plan",),
    "doctor": ("doctor",),
    "eval.command": ("eval",),
    "calibrate": ("calibrate",),
    "pareto.command": ("pareto",),
    "batch": ("batch",),
    "worker": ("worker",),
    "sessions": ("sessions",),
    "bench": ("bench",),
    "export": ("export",),
}
MODULE_OF_COMMAND = {word: module for module, words in COMMANDS_OF_MODULE.items() for word in words}


class LazyCommands(TyperGroup):
    """A command group that creates its commands when they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of --help."""
        return list(MODULE_OF_COMMAND)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; for an unknown name all commands are created, so that similar
        ones are suggested.
        """
        for word in [cmd_name] if cmd_name in MODULE_OF_COMMAND else MODULE_OF_COMMAND:
            if word not in self.commands:
                self.commands.update(load_commands(MODULE_OF_COMMAND[word]))
        return super().get_command(ctx, cmd_name)


def load_commands(module: str) -> dict[str, Any]:
    """Import a module of this folder and return the commands that it registers, by name."""
    group = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    import_module(f"llmcli.commands.{module}").register(group)
    return dict(typer.main.get_group(group).commands)


app = typer.Typer(
    name="llmcli",
    cls=LazyCommands,
    help="From a checkpoint to tokens on this machine: pull, quantize, chat, bench.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"llmcli {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """From a checkpoint to tokens on this machine: pull, quantize, chat, bench."""
