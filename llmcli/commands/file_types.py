"""The lower-case flags of the file types, `--q4_k_m` and its like, for every command that makes
one.

Read off quant's table, so that a type added there has its flag here. It knows flags, not files.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


def with_types(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that has a `quant` option one flag for each file type, all meaning `quant`.

    The wrapped command gets the full name or None; two types at once are a UsageError (exit code
    2).
    """
    table = names()
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
        given = [flag for flag in table if values.pop(flag)]
        values["quant"] = chosen(given, values["quant"], table)
        command(**values)

    del wrapper.__wrapped__
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    wrapper.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {**hints, **{flag.name: flag.annotation for flag in flags}}
    return wrapper


def names() -> dict[str, tuple[str, str]]:
    """Flag without its dashes -> (the type's name, what to say of it)."""
    from quant.file_types import ALIASES, FILE_TYPES

    table = {
        name.lower(): (
            name,
            f"The same as -t {name}{'; needs --imatrix' if kind.needs_imatrix else ''}.",
        )
        for name, kind in FILE_TYPES.items()
    }
    return table | {
        short.lower(): (full, f"{short} means {full}.") for short, full in ALIASES.items()
    }


def chosen(flags: list[str], named: str | None, table: Mapping[str, tuple[str, str]]) -> str | None:
    """The one type that was asked for, as it was spelled; None where nobody asked."""
    from llmcli.errors import UsageError

    spelled = [f"--{flag}" for flag in flags] + ([named] if named else [])
    if len(spelled) > 1:
        raise UsageError(
            f"one type at a time, not {' and '.join(spelled)}",
            hint="give the command once for each",
        )
    return named or (flags[0].upper() if flags else None)
