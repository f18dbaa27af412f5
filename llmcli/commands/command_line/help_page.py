"""The text of --help: usage, description, and the options in panels.

Typer's own page needs Rich, whose import would delay --help, and at 80 columns its table of six
columns ends many lines with an ellipsis. This page has two columns and wraps both; it never breaks
a word or leaves something out.
"""

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmcli.commands.command_line.panels import GENERAL, PANEL_ORDER
from llmcli.word_wrap import text_columns, wrap_text

MAX_COLUMNS, MIN_COLUMNS = 100, 24
MAX_NAME_COLUMNS = 28  # columns for the spellings of an option; longer ones get lines of their own
GAP_COLUMNS = 2
MIN_TEXT_COLUMNS = 32  # with fewer columns for the help texts, they stand below the spellings
INDENT_COLUMNS = 4  # of a help text below its spellings
BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
ROUND_FRAME, ASCII_FRAME = "╭─╮│╰╯", "+-+|++"
# What a value is called that has no name of its own, by what Typer writes.
VALUE_NAMES = {
    "<int>": "N",
    "<int range>": "N",
    "<float>": "X",
    "<float range>": "X",
    "<str>": "TEXT",
    "<list[str]>": "TEXT",
    "<list[int]>": "N",
    "<path>": "PATH",
    "<file>": "FILE",
    "<directory>": "DIR",
    "<list[path]>": "PATH",
    "<list[Path]>": "PATH",
}
ARGUMENTS = "Arguments"
NUMBER = r"-?[\d.]+"


class HelpRow(NamedTuple):
    """A row of a panel: the spellings of an option, or the name of a command, and its help."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class HelpPanel:
    """A titled group of rows."""

    title: str
    rows: tuple[HelpRow, ...]


def parameter_row(parameter: Any, context: Any) -> HelpRow | None:
    """Return the row of an option or argument; None if it is hidden."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    name, text = record
    for typer_name, value_name in VALUE_NAMES.items():
        name = name.replace(typer_name, value_name)
    name = re.sub(r"<([\w|.-]+)>", r"\1", name)  # a choice
    if parameter.param_type_name == "argument":
        name = name.partition(" ")[0]
        text = re.sub(r"; required\]$", "]", text).removesuffix("[required]")
    text = re.sub(rf"({NUMBER})<=x<=({NUMBER})", r"\1 to \2", text)
    text = re.sub(rf"\bx>=({NUMBER})", r"at least \1", text)
    text = re.sub(rf"\bx<=({NUMBER})", r"at most \1", text)
    return HelpRow(name, " ".join(text.split()))


def parameter_panels(command: Any, context: Any) -> list[HelpPanel]:
    """Return the panels of a command's arguments and options, in the order of PANEL_ORDER."""
    panels: dict[str, list[HelpRow]] = {}
    for parameter in command.get_params(context):
        row = parameter_row(parameter, context)
        is_argument = parameter.param_type_name == "argument"
        title = ARGUMENTS if is_argument else getattr(parameter, "rich_help_panel", None) or GENERAL
        if row:
            panels.setdefault(title, []).append(row)
    order = (ARGUMENTS, *PANEL_ORDER)
    return [HelpPanel(title, tuple(panels[title])) for title in sorted(panels, key=order.index)]


def usage(command: Any, context: Any, name: str) -> str:
    """Return the usage line of a command, such as "llmcli run [OPTIONS] REF". `name`: with that of
    the program and the groups before it.
    """
    pieces = (
        re.sub(r"^\{(.*)\}(\.\.\.)?$", r"\1\2", p) for p in command.collect_usage_pieces(context)
    )
    return " ".join([name, *pieces])


def render_page(
    usage_line: str,
    description: str,
    panels: Iterable[HelpPanel],
    columns: int,
    *,
    has_style: bool = False,
    has_unicode: bool = True,
) -> str:
    """Return the help page for a terminal of `columns` columns. `has_style`: use bold and dimmed
    text. `has_unicode`: draw the panels with Unicode's lines.
    """
    columns = max(MIN_COLUMNS, min(columns, MAX_COLUMNS))
    frame = tuple(ROUND_FRAME if has_unicode else ASCII_FRAME)
    parts = [_indent(f"Usage: {usage_line}", columns)]
    for paragraph in inspect.cleandoc(description).split("\n\n"):
        if paragraph:
            parts.append(_indent(" ".join(paragraph.split()), columns))
    panel_texts = [_draw_panel(panel, columns, frame, has_style) for panel in panels]
    return "\n\n".join(parts) + "\n\n" + "\n".join(panel_texts)


def _indent(text: str, columns: int) -> str:
    return "\n".join(f" {line}" for line in _wrap(text, columns - 2))


def _draw_panel(panel: HelpPanel, columns: int, frame: tuple[str, ...], has_style: bool) -> str:
    """Return a panel as lines of `columns` columns."""
    top_left, line, top_right, side, bottom_left, bottom_right = frame
    bold, dim, reset = (BOLD, DIM, RESET) if has_style else ("", "", "")
    inner = columns - 4  # without the frame and a blank on both sides
    longest = max(text_columns(row.name) for row in panel.rows)
    name_columns = min(longest, MAX_NAME_COLUMNS)
    if inner - name_columns - GAP_COLUMNS < min(MIN_TEXT_COLUMNS, inner - INDENT_COLUMNS):
        name_columns = INDENT_COLUMNS - GAP_COLUMNS  # names above their texts
    title = f" {panel.title} "
    after = line * (columns - 3 - text_columns(title))
    lines = [f"{dim}{top_left}{line}{reset}{bold}{title}{reset}{dim}{after}{top_right}{reset}"]
    for row in panel.rows:
        for name, text in _row_lines(row, name_columns, inner):
            width = name_columns + GAP_COLUMNS if text else inner
            name_field = bold + name + reset + " " * (width - text_columns(name))
            fill = " " * (inner - width - text_columns(text))
            lines.append(f"{dim}{side}{reset} {name_field}{text}{fill} {dim}{side}{reset}")
    lines.append(f"{dim}{bottom_left}{line * (columns - 2)}{bottom_right}{reset}")
    return "\n".join(lines)


def _row_lines(row: HelpRow, name_columns: int, inner: int) -> list[tuple[str, str]]:
    """Return the lines of a row as pairs of name and text. A name that is longer than its column
    has lines of its own.
    """
    texts = _wrap(row.text, inner - name_columns - GAP_COLUMNS)
    if text_columns(row.name) <= name_columns and texts:
        return [(row.name, texts[0]), *(("", text) for text in texts[1:])]
    return [*((name, "") for name in _wrap(row.name, inner)), *(("", text) for text in texts)]


def _wrap(text: str, columns: int) -> list[str]:
    """Return the lines of a text in `columns` columns; none for an empty text."""
    return wrap_text(text, columns + 1, divides_words=True).split("\n") if text else []
