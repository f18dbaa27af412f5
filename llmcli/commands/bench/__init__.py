"""`llmcli bench`, a group of subcommands. Each module of this folder exports its subcommands as
BENCHES; the function's name is the subcommand's name.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from quant.registry import collect

DEFAULT_BENCH = "speed"  # the subcommand that `bench REF` runs


class BenchGroup(TyperGroup):
    """The `bench` group. `bench NAME REF` runs the subcommand NAME, and `bench REF` the
    speed test.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. If the first one is not the name of a subcommand, the arguments
        belong to the speed test.
        """
        return super().parse_args(
            ctx, args if args and args[0] in self.commands else [DEFAULT_BENCH, *args]
        )


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    benches = typer.Typer(cls=BenchGroup, help="Measure prompt and generation speed, and more.")
    commands = collect("llmcli.commands.bench", "BENCHES", "__name__")
    for name, command in commands.items():
        benches.command(name, epilog=_list_others(commands) if name == DEFAULT_BENCH else None)(
            command
        )
    app.add_typer(benches, name="bench")


def _list_others(commands: Mapping[str, Any]) -> str:
    """Return the paragraph of the help text that lists the other subcommands with their
    summaries.
    """
    rows = [
        f"  bench {name:<9} {_summary(command)}"
        for name, command in commands.items()
        if name != DEFAULT_BENCH
    ]
    return "\n".join(("\b", "Other measurements:", *rows))


def _summary(command: Any) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]
