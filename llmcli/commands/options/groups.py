"""Groups of options. If a parameter of a command is a frozen dataclass, each of its fields becomes
an option.

The dataclass is defined by the code that uses it and does not depend on Typer. A command annotates
its parameter as `Annotated[SizeRequest, option_group(target_size=typer.Option(...))]`. The option
names and help texts are in `commands/`; the fields and their defaults are in the dataclass.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

import typer
import typer.models


@dataclasses.dataclass(frozen=True, slots=True)
class OptionGroup:
    """The Typer options of a dataclass, by field name."""

    options: Mapping[str, typer.models.OptionInfo]


def option_group(panel_title: str | None = None, /, **options: Any) -> OptionGroup:
    """Return the Typer options of a dataclass. `options`: a `typer.Option()` for each field, by its
    name. `panel_title`: the panel of --help for those without one.
    """
    for option in options.values():
        option.rich_help_panel = option.rich_help_panel or panel_title
    return OptionGroup(options)


class FlagWords(Protocol):
    """How one of the run options is spelled and explained."""

    @property
    def spellings(self) -> tuple[str, ...]: ...
    @property
    def help(self) -> str: ...
    @property
    def metavar(self) -> str | None: ...


def flag_option(flag: FlagWords, panel_title: str | None = None) -> Any:
    """Return one of the run options as the Typer option of a group, whose help is a sentence."""
    sentence = f"{flag.help[0].upper()}{flag.help[1:]}."
    return typer.Option(
        *flag.spellings, metavar=flag.metavar, help=sentence, rich_help_panel=panel_title
    )


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclass parameters as Typer options.

    The returned function builds the dataclasses and passes them to `command`. A field without a
    default becomes a required option.
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
    """Return the option group in the annotation of a parameter; None if it has none."""
    if get_origin(hint) is not Annotated:
        return None
    return next(
        (annotation for annotation in get_args(hint)[1:] if isinstance(annotation, OptionGroup)),
        None,
    )


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
