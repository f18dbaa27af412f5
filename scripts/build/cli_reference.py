#!/usr/bin/env python3
"""Write docs/cli.md, the reference of every llmcli command with its arguments and options.

usage: .venv/bin/python scripts/build/cli_reference.py [--check]

The page is built from the option objects of the program, not from the text of --help, whose line
breaks depend on the terminal. With --check nothing is written, and the exit code is 1 if the page
is out of date.
"""

import html
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import typer

from scripts.build.generated_page import ROOT, update_page

PAGE = ROOT / "docs" / "cli.md"
HEAD = """\
# Command reference

This page is for people who look up an option.

`scripts/build/cli_reference.py` writes it from the program, and a test keeps it current.
`llmcli COMMAND --help` prints the same text.
Every command also takes `-h` and `--help`.
"""
RUN_COMMANDS = ("chat", "run", "serve", "batch")
RUN_OPTIONS = "Run options"
FILE_TYPES = "File types"
SECTIONS = {
    RUN_OPTIONS: "`chat`, `run`, `serve`, `batch` and `export vllm` share these options.",
    FILE_TYPES: "`pull` and `quantize` take one of these flags instead of the name of a type.",
}
HELP_OPTION = "--help"
DEFAULT_SUBCOMMANDS = {"bench": "speed"}
Row = tuple[str, str]  # an option's spellings, such as "-t, --threads INTEGER", and its help text


def build_page() -> str:
    """Return the text of docs/cli.md."""
    commands = dict(all_commands())
    shared = {RUN_OPTIONS: run_options(commands), FILE_TYPES: file_type_options(commands)}
    parts = [HEAD]
    parts += [command_section(name, command, shared) for name, command in commands.items()]
    for title, rows in shared.items():
        parts.append(f"## {title}\n\n{SECTIONS[title]}\n\n{table('option', rows)}")
    return "\n".join(parts)


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its name, such as "bench speed". The name of `llmcli` itself is
    empty.
    """
    from llmcli.commands.cli import app

    yield from _walk("", typer.main.get_command(app))


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    if hasattr(command, "list_commands"):
        context = _context(name, command)
        for word in command.list_commands(context):
            yield from _walk(f"{name} {word}".strip(), command.get_command(context, word))


def run_options(commands: dict[str, Any]) -> list[Row]:
    """Return the options that all RUN_COMMANDS share, in the order of the panels of --help."""
    others = [set(options(name, commands[name])) for name in RUN_COMMANDS[1:]]
    first = options(RUN_COMMANDS[0], commands[RUN_COMMANDS[0]])
    return [row for row in first if all(row in rows for rows in others)]


def file_type_options(commands: dict[str, Any]) -> list[Row]:
    """Return the flags of `quantize` that are named after file types, such as --q4_k_m."""
    from quant.recipes.file_types import FILE_TYPE_ALIASES, FILE_TYPES

    flags = {f"--{name.lower()}" for name in (*FILE_TYPES, *FILE_TYPE_ALIASES)}
    return [row for row in options("quantize", commands["quantize"]) if row[0] in flags]


def options(name: str, command: Any) -> list[Row]:
    """Return the options of a command with their help texts, without --help."""
    return [row for kind, row in _parameters(name, command) if kind == "option"]


def arguments(name: str, command: Any) -> list[Row]:
    """Return the positional arguments of a command with their help texts."""
    return [row for kind, row in _parameters(name, command) if kind == "argument"]


def _parameters(name: str, command: Any) -> Iterator[tuple[str, Row]]:
    """Yield the kind and the row of each argument and option, in the order of --help."""
    from llmcli.commands.command_line import help_page

    for panel in help_page.parameter_panels(command, _context(name, command)):
        kind = "argument" if panel.title == help_page.ARGUMENTS else "option"
        yield from ((kind, row) for row in panel.rows if not row.name.endswith(HELP_OPTION))


def command_section(name: str, command: Any, shared: dict[str, list[Row]]) -> str:
    """Return the Markdown section of one command. Options that belong to a group in `shared` are
    replaced by a link to that group.
    """
    parts = [f"## {name or 'llmcli'}", f"```text\n{usage(name, command)}\n```", prose(command)]
    if word := DEFAULT_SUBCOMMANDS.get(name):
        parts.append(f"`llmcli {name} …` without a subcommand means `llmcli {name} {word} …`.")
    if rows := arguments(name, command):
        parts.append(table("argument", rows))
    rows = options(name, command)
    notes = []
    for title, common in shared.items():
        if set(common) <= set(rows):
            rows = [row for row in rows if row not in common]
            anchor = title.lower().replace(" ", "-")
            notes.append(f"It also takes the [{title.lower()}](#{anchor}).")
    if rows:
        parts.append(table("option", rows))
    return "\n\n".join([*(part.rstrip("\n") for part in parts if part), *notes]) + "\n"


def usage(name: str, command: Any) -> str:
    """Return the usage line of a command, such as "llmcli run [OPTIONS] REF"."""
    from llmcli.commands.command_line import help_page

    return help_page.usage(command, _context(name, command), f"llmcli {name}".strip())


def prose(command: Any) -> str:
    """Return the help text of a command in Markdown, with each paragraph on one line."""
    text = inspect.cleandoc(command.help or "")
    return "\n\n".join(escape(" ".join(part.split())) for part in text.split("\n\n"))


def table(kind: str, rows: list[Row]) -> str:
    """Return a Markdown table of options or arguments. `kind` is the title of its first column."""
    lines = [f"| {kind} | meaning |", "|---|---|"]
    for spellings, text in rows:
        parts = ", ".join(code(part) for part in spellings.split(", "))
        lines.append(f"| {parts} | {escape(' '.join(text.split()))} |")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Return a code span for a table cell. Text with a bar becomes HTML, because some renderers do
    not accept an escaped bar in backticks.
    """
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def escape(text: str) -> str:
    """Escape the characters that Markdown would read as markup. Text between backticks is code and
    is not escaped, except for bars.
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part.replace("|", r"\|") if part.startswith("`") else re.sub(r"([*<>|\[\]])", r"\\\1", part)
        for part in parts
    )


def _context(name: str, command: Any) -> Any:
    return command.context_class(command, info_name=f"llmcli {name}".strip(), terminal_width=80)


if __name__ == "__main__":
    update_page(__doc__ or "", PAGE, build_page)
