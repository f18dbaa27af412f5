"""`llmcli bench`: each module of this folder exports BENCHES, measurements by their functions'
names.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from quant.registry import collect

SPEED = "speed"  # what `bench REF` is short for


class Benches(TyperGroup):
    """`bench REF` measures as llama-bench does; `bench roofline REF` is another measurement."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words that name no measurement are those of the first one."""
        return super().parse_args(
            ctx, args if args and args[0] in self.commands else [SPEED, *args]
        )


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    benches = typer.Typer(cls=Benches, help="Measure prompt and generation speed, and more.")
    found = collect("llmcli.commands.benches", "BENCHES", "__name__")
    for name, command in found.items():
        benches.command(name, epilog=_others(found) if name == SPEED else None)(command)
    app.add_typer(benches, name="bench")


def _others(found: Mapping[str, Any]) -> str:
    """The other measurements, for the end of the first one's help: their names and what they do."""
    rows = [
        f"  bench {name:<9} {_summary(command)}" for name, command in found.items() if name != SPEED
    ]
    return "\n".join(("\b", "Other measurements:", *rows))


def _summary(command: Any) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]
