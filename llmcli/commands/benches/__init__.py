"""`llmcli bench`: each module of this folder exports BENCHES, measurements by their functions' names."""

from typing import Any

import typer
from typer.core import TyperGroup

from quant.registry import collect

SPEED = "speed"  # what `bench REF` is short for


class Benches(TyperGroup):
    """`bench REF` measures as llama-bench does; `bench roofline REF` is another measurement."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words that name no measurement are those of the first one."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else [SPEED, *args])


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    benches = typer.Typer(
        cls=Benches, help="Measure prompt and generation speed, and more."
    )
    for name, command in collect("llmcli.commands.benches", "BENCHES", "__name__").items():
        benches.command(name)(command)
    app.add_typer(benches, name="bench")
