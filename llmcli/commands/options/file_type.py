"""One flag for each file type, such as `--q4_k_m`. The flags are derived from quant's table of file
types.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from llmcli.commands.command_line import panels


def with_type_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with one flag for each file type added. The command must have a `quant`
    option.

    A flag such as `--q4_k_m` sets `quant` to the name of the type. Two types at once raise a
    UsageError (exit code 2).
    """
    table = type_flags()
    hints = get_type_hints(command, include_extras=True)
    flags = [
        inspect.Parameter(
            flag,
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool, typer.Option(f"--{flag}", help=text, rich_help_panel=panels.FILE_TYPES)
            ],
        )
        for flag, (_, text) in table.items()
    ]

    @wraps(command)
    def wrapper(**values: Any) -> None:
        typed_flags = [flag for flag in table if values.pop(flag)]
        values["quant"] = resolve_type(typed_flags, values["quant"], table)
        command(**values)

    del wrapper.__wrapped__
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    wrapper.__signature__ = inspect.Signature([*parameters, *flags])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {**hints, **{flag.name: flag.annotation for flag in flags}}
    return wrapper


def type_flags() -> dict[str, tuple[str, str]]:
    """Return the file type and the help text of each flag, by the flag's name without dashes."""
    from quant.recipes.file_types import FILE_TYPE_ALIASES, FILE_TYPES

    table = {
        name.lower(): (
            name,
            f"Same as --type {name}{'; needs --imatrix' if kind.needs_imatrix else ''}.",
        )
        for name, kind in FILE_TYPES.items()
    }
    return table | {
        short.lower(): (full, f"{short} means {full}.") for short, full in FILE_TYPE_ALIASES.items()
    }


def resolve_type(
    flags: list[str], type_option: str | None, table: Mapping[str, tuple[str, str]]
) -> str | None:
    """Return the requested file type; None if there is none. `flags`: the typed flags,
    `type_option`: the value of --type. Raises UsageError if several types are requested.
    """
    from llmcli.errors import UsageError

    spellings = [f"--{flag}" for flag in flags] + ([type_option] if type_option else [])
    if len(spellings) > 1:
        raise UsageError(
            f"several types given: {' and '.join(spellings)}",
            hint="run the command once for each type",
        )
    return type_option or (flags[0].upper() if flags else None)
