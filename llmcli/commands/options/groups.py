"""Groups of options: a command parameter that is a frozen dataclass becomes an option per field.

The dataclass is plain and belongs to the code that uses it. A command annotates its parameter with
`Annotated[SizeRequest, option_group(target_size=typer.Option(...))]`. The names and help texts of
the options are in `commands/`; the fields and their defaults are in the dataclass.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer.models


@dataclasses.dataclass(frozen=True, slots=True)
class OptionGroup:
    """The Typer options of a dataclass, by field."""

    options: Mapping[str, typer.models.OptionInfo]


def option_group(**options: Any) -> OptionGroup:
    """Return the Typer options of a dataclass; `options` maps each field to its typer.Option()."""
    return OptionGroup(options)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its option groups as Typer options.

    The wrapper builds the dataclasses and passes them to `command`. A field without a default
    becomes a required option.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group = _find_group(hints[name])
        if group is not None:
            groups[name] = get_args(hints[name])[0]
            parameters += _group_parameters(groups[name], group)
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


def _find_group(hint: Any) -> OptionGroup | None:
    """Return the option group of an annotated parameter, None if it has none."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, OptionGroup)), None)


def _group_parameters(dataclass: type, group: OptionGroup) -> list[inspect.Parameter]:
    hints = get_type_hints(dataclass)
    fields = dataclasses.fields(dataclass)
    assert {field.name for field in fields} == group.options.keys(), dataclass
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=Annotated[hints[field.name], group.options[field.name]],
        )
        for field in fields
    ]
