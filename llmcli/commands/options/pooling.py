"""The option --pooling of serve, embed and rerank."""

from typing import Annotated

import typer

from llmcli.commands.command_line import panels
from llmcli.errors import UsageError

Pooling = Annotated[
    str | None,
    typer.Option(
        metavar="none|mean|cls|last|rank",
        help="How tokens become one embedding; default: as the file says. none: a vector for each "
        "token, rank: scores of pairs.",
        rich_help_panel=panels.REQUESTS,
    ),
]


def check_pooling(kind: str | None) -> None:
    """Raise UsageError for an unknown value of --pooling."""
    if kind is None:
        return
    from llmcli.runtime.scoring.embedder import POOLING_CHOICES

    if kind not in POOLING_CHOICES:
        raise UsageError(
            f"--pooling is {kind!r}", hint=f"--pooling takes {', '.join(POOLING_CHOICES)}"
        )
