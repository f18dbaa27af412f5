"""Groups of options: a command parameter that is a frozen dataclass becomes an option per field."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_type_hints


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclass parameters as Typer options.

    The wrapper builds the dataclasses and passes them to `command`. A field without a default
    becomes an argument or a required option.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]) and isinstance(hints[name], type):
            groups[name] = hints[name]
            parameters += _group_parameters(hints[name])
        else:
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    @wraps(command)
    def wrapper(**values: Any) -> None:
        group_values = {
            name: group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
            for name, group in groups.items()
        }
        command(**values, **group_values)

    del wrapper.__wrapped__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _group_parameters(group: type) -> list[inspect.Parameter]:
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
