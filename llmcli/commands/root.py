"""The command line: every command under its word. A module is imported when one of its words is
asked for.
"""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from llmcli import __version__

# In the order of --help: the modules of this folder, and the words that each registers.
WORDS = {
    "models": ("pull", "list", "rm", "gc", "alias"),
    "show": ("show",),
    "diff": ("diff",),
    "convert": ("convert",),
    "quantize": ("quantize",),
    "chat": ("chat", "run"),
    "serve": ("serve",),
    "plan": ("plan",),
    "doctor": ("doctor",),
    "eval": ("eval",),
    "calibrate": ("calibrate",),
    "pareto": ("pareto",),
    "batch": ("batch",),
    "worker": ("worker",),
    "sessions": ("sessions",),
    "benches": ("bench",),
    "exports": ("export",),
}
MODULES = {word: module for module, words in WORDS.items() for word in words}


class Commands(TyperGroup):
    """All words are known, commands are made when they are wanted."""

    def list_commands(self, ctx: Any) -> list[str]:
        """As --help has them."""
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a word; for one that nobody knows all are made: those like it are
        suggested.
        """
        for word in [cmd_name] if cmd_name in MODULES else MODULES:
            if word not in self.commands:
                self.commands.update(made(MODULES[word]))
        return super().get_command(ctx, cmd_name)


def made(module: str) -> dict[str, Any]:
    """What a module of this folder registers, by its words."""
    part = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    import_module(f"llmcli.commands.{module}").register(part)
    return dict(typer.main.get_group(part).commands)


app = typer.Typer(
    name="llmcli",
    cls=Commands,
    help="From a checkpoint to tokens on this machine: pull, quantize, chat, bench.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmcli {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and leave."
    ),
) -> None:
    """From a checkpoint to tokens on this machine: pull, quantize, chat, bench."""
