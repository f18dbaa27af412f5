"""`llmcli bench`, a group of subcommands. Each module of this folder exports its subcommands as
BENCHES; the function's name is the subcommand's name.
"""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from llmcli.commands.command_line.command_app import CommandApp, PanelCommand, PanelGroup
from llmcli.commands.command_line.help_page import HelpPanel, HelpRow
from llmcli.commands.command_line.typed_words import nearest_names, unknown_command
from quant.registry import collect

DEFAULT_BENCH = "speed"  # the subcommand that `bench REF` runs


class BenchGroup(PanelGroup):
    """The `bench` group. `bench NAME REF` runs the subcommand NAME, and `bench REF` the
    speed test.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. If the first one is not the name of a subcommand, the arguments
        belong to the speed test. Raises UsageError for a misspelled subcommand.
        """
        if args and args[0] in self.commands:
            return super().parse_args(ctx, args)
        if args and not ctx.resilient_parsing and _is_misspelled(args[0], self.commands):
            raise unknown_command(args[0], self.commands, ctx.command_path)
        return super().parse_args(ctx, [DEFAULT_BENCH, *args])


class SpeedCommand(PanelCommand):
    """The speed test, whose --help also lists the other subcommands, because it is also the page of
    `bench --help`.
    """

    def extra_panels(self, ctx: Any) -> Iterable[HelpPanel]:
        """Return the panel of the other measurements."""
        rows = [
            HelpRow(f"bench {name}", _summary(command))
            for name, command in collect("llmcli.commands.bench", "BENCHES", "__name__").items()
            if name != DEFAULT_BENCH
        ]
        return [HelpPanel("Other measurements", tuple(rows))]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    benches = CommandApp(cls=BenchGroup, help="Measure prompt and generation speed, and more.")
    for name, command in collect("llmcli.commands.bench", "BENCHES", "__name__").items():
        kind = SpeedCommand if name == DEFAULT_BENCH else PanelCommand
        benches.command(name, cls=kind)(command)
    app.add_typer(benches, name="bench")


def _is_misspelled(word: str, names: Iterable[str]) -> bool:
    """Return whether a word is like the name of a subcommand and names no model: it is not a path,
    and not in the catalog.
    """
    if not word.isalpha() or not nearest_names(word, names) or Path(word).exists():
        return False
    from llmcli import config
    from llmcli.catalog import catalog
    from llmcli.errors import UserError

    try:
        entries = catalog.load_catalog(config.load_config())
    except UserError:  # the command itself reports the error
        return True
    return all(word.lower() != name.lower().partition(":")[0] for name in entries)


def _summary(command: Any) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]
