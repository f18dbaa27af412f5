"""The command line: all commands by name. A command's module is imported only when the command is
used, so that llmcli starts fast.
"""

import itertools
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import typer

from llmcli import __version__
from llmcli.commands.command_line.command_app import CommandApp, PanelGroup
from llmcli.commands.command_line.help_page import HelpRow

# The modules of this folder, and for each the commands that it registers with their summaries, in
# the order of --help. The summaries are repeated here so that --help imports no command.
COMMANDS_OF_MODULE = {
    "models": {
        "pull": "Download and verify a model; with --quant also quantize it.",
        "list": "List the models on this disk, and your own names for them.",
        "rm": "Remove a model and its quantized files.",
        "gc": "Delete partial downloads, leftovers of interrupted runs, and saved states of lost models.",
        "alias": "Give a model your own name, system prompt and settings.",
    },
    "show": {
        "show": "Show what a model contains, or where it would come from.",
    },
    "diff": {
        "diff": "Compare the metadata and the tensors of two GGUF models.",
    },
    "convert": {
        "convert": "Convert a checkpoint folder into a GGUF of floats or Q8_0.",
    },
    "quantize.command": {
        "quantize": "Quantize a checkpoint folder or a GGUF.",
    },
    "chat.command": {
        "chat": "Chat with a model.",
        "run": "Answer one prompt and exit.",
    },
    "serve": {
        "serve": "Answer many requests at once over HTTP, with OpenAI's API.",
    },
    "ps": {
        "ps": "List the models of a running server, and the memory that they take.",
    },
    "plan.command": {
        "plan": "Print the memory that a run takes before it is allocated.",
    },
    "doctor": {
        "doctor": "Check this machine, the build of llama.cpp, and stored files.",
    },
    "eval.command": {
        "eval": "Measure a model's perplexity, and its divergence from a base.",
    },
    "calibrate": {
        "calibrate": "Measure how much each input of each weight matters.",
    },
    "pareto.command": {
        "pareto": "Compare size, divergence and speed of several quantizations.",
    },
    "batch": {
        "batch": "Answer the prompts of a file, many at once.",
    },
    "embed": {
        "embed": "Compute a vector for each line of some files.",
    },
    "rerank": {
        "rerank": "Rank documents by how well they answer a query.",
    },
    "worker": {
        "worker": "Lend this machine's devices to a model on another machine.",
    },
    "sessions": {
        "sessions": "List the conversations on this disk.",
    },
    "bench": {
        "bench": "Measure prompt and generation speed, and more.",
    },
    "export": {
        "export": "Write what another engine needs to run the same model.",
    },
}
MODULE_OF_COMMAND = {name: module for module, names in COMMANDS_OF_MODULE.items() for name in names}
SUMMARIES = {name: text for names in COMMANDS_OF_MODULE.values() for name, text in names.items()}


class LazyCommands(PanelGroup):
    """A command group that imports a command's module when the command is first needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in the order of --help."""
        return list(MODULE_OF_COMMAND)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; None if it does not exist."""
        if cmd_name in MODULE_OF_COMMAND and cmd_name not in self.commands:
            self.commands.update(load_commands(MODULE_OF_COMMAND[cmd_name]))
        return super().get_command(ctx, cmd_name)

    def summaries(self, ctx: Any) -> Iterable[HelpRow]:
        """Return the commands for --help, without importing them."""
        return itertools.starmap(HelpRow, SUMMARIES.items())


def load_commands(module: str) -> dict[str, Any]:
    """Import a module of this folder, and return the commands that it registers, by name. `module`:
    its path without "llmcli.commands.".
    """
    group = CommandApp()
    import_module(f"llmcli.commands.{module}").register(group)
    return dict(typer.main.get_group(group).commands)


app = CommandApp(
    name="llmcli",
    cls=LazyCommands,
    help="From a checkpoint to tokens on this machine: pull, quantize, chat, bench.",
    no_args_is_help=True,
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
