"""Options in groups: a command's parameter that is a frozen dataclass stands for one option for
each of its fields.

A group is a noun of its own, used by several commands; a new option is a field. It knows flags, not
what they do.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give Typer the fields of the command's dataclasses as options; the command gets the
    dataclasses made of them.

    A field without a default is an argument, or an option that must be given.
    """
    hints = get_type_hints(command, include_extras=True)
    own: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]) and isinstance(hints[name], type):
            groups[name] = hints[name]
            own += _options(hints[name])
        else:
            own.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    @wraps(command)
    def wrapper(**values: Any) -> None:
        made = {
            name: group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
            for name, group in groups.items()
        }
        command(**values, **made)

    del wrapper.__wrapped__
    wrapper.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    return wrapper


def _options(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
