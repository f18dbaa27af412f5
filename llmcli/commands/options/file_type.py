"""One flag for each file type, such as `--q4_k_m`, derived from quant's table of types."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


def with_type_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add one flag for each file type to a command that has a `quant` option.

    A flag such as `--q4_k_m` is another way to set `quant`. The command receives the type's name or
    None; two types at once are a UsageError (exit code 2).
    """
    table = type_flags()
    hints = get_type_hints(command, include_extras=True)
    flags = [
        inspect.Parameter(
            flag,
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option(f"--{flag}", help=text)],
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
    """Return the flags without dashes, with the type's name and the help text of each."""
    from quant.recipes.file_types import FILE_TYPE_ALIASES, FILE_TYPES

    table = {
        name.lower(): (
            name,
            f"Same as -t {name}{'; needs --imatrix' if kind.needs_imatrix else ''}.",
        )
        for name, kind in FILE_TYPES.items()
    }
    return table | {
        short.lower(): (full, f"{short} means {full}.") for short, full in FILE_TYPE_ALIASES.items()
    }


def resolve_type(
    flags: list[str], type_option: str | None, table: Mapping[str, tuple[str, str]]
) -> str | None:
    """Return the requested type as it was spelled, None if there is none; raises UsageError for
    several.
    """
    from llmcli.errors import UsageError

    spellings = [f"--{flag}" for flag in flags] + ([type_option] if type_option else [])
    if len(spellings) > 1:
        raise UsageError(
            f"several types given: {' and '.join(spellings)}",
            hint="run the command once for each type",
        )
    return type_option or (flags[0].upper() if flags else None)
