"""Options of `llmcli serve` for several models."""

from collections.abc import Mapping
from typing import Annotated

import typer

from llmcli.commands.command_line import panels
from llmcli.commands.options.arguments import DEFAULT_MODEL
from llmcli.errors import UsageError

DEFAULT_KEEP_ALIVE = "5m"  # as in ollama

MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="With several models: the most memory of all together, such as 8G. [what is free]",
        rich_help_panel=panels.REQUESTS,
    ),
]
KeepAlive = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="With several models: how long an idle one stays loaded, such as 30s, 5m or -1 for "
        "ever; 0: not at all. [5m]",
        rich_help_panel=panels.REQUESTS,
    ),
]


def read_pool_options(
    limit: str | None, keep_alive: str | None, serves_several: bool
) -> tuple[int | None, float]:
    """Return the bytes of --memory-limit and the seconds of --keep-alive. Raises UsageError or
    UserError if one is wrong, or has no meaning for a single model.
    """
    from llmcli.units import parse_duration
    from quant.quantize.shards import parse_size

    for flag, value in (("--memory-limit", limit), ("--keep-alive", keep_alive)):
        if value is not None and not serves_several:
            raise UsageError(
                f"{flag} applies only to several models",
                hint="give no REF or several, or leave it out",
            )
    limit_bytes = None if limit is None else parse_size(limit, "--memory-limit", "memory")
    try:
        seconds = parse_duration(keep_alive or DEFAULT_KEEP_ALIVE)
    except ValueError as error:
        raise UsageError(f"--keep-alive: {error}", hint="--keep-alive 10m") from None
    return limit_bytes, seconds


def refuse_single_options(options: Mapping[str, object]) -> None:
    """Raise UsageError if one of these options is set, which belong to a single model."""
    for flag, value in options.items():
        if value:
            raise UsageError(
                f"{flag} belongs to a server of a single model",
                hint=f"llmcli serve {DEFAULT_MODEL} {flag} …",
            )
