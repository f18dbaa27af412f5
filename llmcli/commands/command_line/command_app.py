"""The classes of all commands: Typer's, with our pages of --help, and errors that name the nearest
command or option.
"""

import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ParameterInfo

from llmcli.commands.command_line import help_page, typed_words
from llmcli.commands.command_line.help_page import HelpPanel, HelpRow
from llmcli.errors import UsageError
from llmcli.text_input import expand_path

HELP_OPTIONS = frozenset(("-h", "--help"))


class PanelCommand(TyperCommand):
    """A command with our page of --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError if they are wrong."""
        return parse_words(self, ctx, args, super().parse_args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page of --help."""
        write_page(self, ctx, formatter, after=self.extra_panels(ctx))

    def extra_panels(self, ctx: Any) -> Iterable[HelpPanel]:
        """Return panels that stand below those of the options."""
        return ()


class PanelGroup(TyperGroup):
    """A group of commands with our page of --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before the subcommand. Raises UsageError if they are wrong."""
        return parse_words(self, ctx, args, super().parse_args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the other arguments. Raises UsageError for an unknown
        command.
        """
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise typed_words.unknown_command(args[0], self.list_commands(ctx), ctx.command_path)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page of --help, with the commands."""
        commands = HelpPanel("Commands", tuple(self.summaries(ctx)))
        write_page(self, ctx, formatter, before=[commands])

    def summaries(self, ctx: Any) -> Iterable[HelpRow]:
        """Return the names of the commands and what they do, in the order of --help."""
        for name in self.list_commands(ctx):
            if (command := self.get_command(ctx, name)) and not command.hidden:
                yield HelpRow(name, command.get_short_help_str(limit=1000))


class CommandApp(typer.Typer):
    """A Typer app whose commands and groups have the classes of this module."""

    def __init__(self, **settings: Any) -> None:
        # Typer's own pages are not used; without Rich it also prints errors without a frame.
        settings = {"cls": PanelGroup, "rich_markup_mode": None, **settings}
        super().__init__(pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Return a decorator that adds a function as a command. `~` at the start of a typed path is
        a home folder.
        """
        add = super().command(name, **{"cls": PanelCommand, **settings})
        return lambda function: add(_with_expanded_paths(function))


def _with_expanded_paths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Typer read the paths among a command's parameters with `expand_path`. Return the command.

    Without it, Typer makes a Path of the typed text, which then does not show whether it began with
    `~` or with `./~`.
    """
    for hint in get_type_hints(function, include_extras=True).values():
        if get_origin(hint) is Annotated and _has_path(hint):
            for annotation in get_args(hint)[1:]:
                if isinstance(annotation, ParameterInfo):
                    annotation.parser = expand_path
    return function


def _has_path(kind: Any) -> bool:
    """Return whether a type is Path, or contains it, as list[Path] does."""
    return kind is Path or any(map(_has_path, get_args(kind)))


def parse_words(
    command: Any, ctx: Any, args: list[str], parse: Callable[[Any, list[str]], list[str]]
) -> list[str]:
    """Check and parse the arguments of a command. `parse`: Typer's parser of the command. Raises
    UsageError if they are wrong.
    """
    if not ctx.resilient_parsing:
        typed_words.check_words(command, ctx, args)
    try:
        return parse(ctx, args)
    except typer.BadParameter as error:
        message = error.format_message().removesuffix(".").replace(": Value error, ", ": ")
        hint = f"`{ctx.command_path} --help` describes it"
        raise UsageError(message[:1].lower() + message[1:], hint=hint) from None


def write_page(
    command: Any,
    ctx: Any,
    formatter: Any,
    before: Iterable[HelpPanel] = (),
    after: Iterable[HelpPanel] = (),
) -> None:
    """Write the page of --help of a command. `before`, `after`: panels above and below those of the
    options.
    """
    from llmcli.config import load_config

    try:
        has_unicode = bool("╭│".encode(sys.stdout.encoding))
    except (UnicodeEncodeError, TypeError):
        has_unicode = False
    formatter.write(
        help_page.render_page(
            help_page.usage(command, ctx, ctx.command_path),
            command.help or "",
            [*before, *help_page.parameter_panels(command, ctx), *after],
            shutil.get_terminal_size().columns,
            has_style=sys.stdout.isatty() and load_config().color,
            has_unicode=has_unicode,
        )
    )
