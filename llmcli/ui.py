"""`UI`: all output of llmcli to the terminal. It prints text, tables, progress and errors for
people, or a single JSON document.

With --json, stdout gets exactly one JSON document, and everything else is printed on stderr. Rich
is imported only when something is drawn, so that `--help` is fast.
"""

import io
import json as json_module
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from llmcli import terminal_status
from llmcli.errors import OutputClosed, UserError
from llmcli.types import ProgressBar
from llmcli.units import format_size
from llmcli.word_wrap import text_columns, wrap_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


MAX_COLUMNS = 10_000  # width of a table that is not printed on a terminal
MIN_CELL_COLUMNS = 12  # width of a cell that can be wrapped
COLUMN_GAP = 2  # columns that Rich leaves between two cells


@dataclass(frozen=True)
class UI:
    """Prints the output of a command, with the settings of the command line."""

    json: bool = False  # whether stdout is reserved for a JSON document (--json)
    color: bool = True  # whether to use colors and bold text; False with NO_COLOR

    def text(self, line: str = "") -> None:
        """Print one line on stdout, or on stderr with --json. Control characters are made
        visible.
        """
        write_now(sys.stderr if self.json else sys.stdout, escape_controls(line) + "\n")

    def prose(self, text: str) -> None:
        """Print text on stdout as `text` does. On a terminal, it is wrapped between words."""
        stream = sys.stderr if self.json else sys.stdout
        write_now(stream, wrap_line(escape_controls(text), stream) + "\n")

    def note(self, text: str) -> None:
        """Print one line on stderr that is neither a result nor an error. Control characters are
        made visible. On a terminal, a long line is wrapped between words.
        """
        write_now(sys.stderr, wrap_line(escape_controls(text), sys.stderr) + "\n")

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        self.note(f"warning: {text}")

    def error(self, message: str, hint: str = "") -> None:
        """Print the message of an error on stderr, and in a second line its hint, if there is
        one. A hint is not wrapped, so that a command in it can be copied.
        """
        terminal_status.end()
        self.note("error: " + " ".join(message.split()))
        if hint:
            write_now(sys.stderr, escape_controls("hint: " + " ".join(hint.split())) + "\n")

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show what is being done on the terminal of stderr during the `with` block, below all
        other output. Without a terminal nothing is shown.
        """
        terminal_status.show(escape_controls(text))
        try:
            yield
        finally:
            terminal_status.end()

    def result(self, document: Any) -> None:
        """Print the JSON document of a command with --json on stdout, in one line. Control
        characters in it are written as escapes.
        """
        text = json_module.dumps(document, ensure_ascii=False, allow_nan=False)
        write_now(sys.stdout, escape_json_controls(text) + "\n")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
    ) -> None:
        """Print a table. `columns`: the headers. `right`: the headers of the columns that are
        aligned to the right. The first column contains names that users copy.

        On a terminal, long cells are wrapped, except names and cells aligned to the right. If the
        terminal is too narrow even so, each row becomes a paragraph that begins with its name.
        """
        from rich.table import Table
        from rich.text import Text

        cells = [[escape_controls(cell) for cell in row] for row in rows]
        stream = sys.stderr if self.json else sys.stdout
        unwrapped = {0, *(number for number, column in enumerate(columns) if column in right)}
        width = terminal_columns(stream) if stream.isatty() else None
        if width and _least_table_width(columns, cells, unwrapped) > width:
            write_now(stream, _draw_paragraphs(columns, cells, width))
            return
        table = Table(box=None, pad_edge=False, header_style="bold" if self.color else "")
        for number, column in enumerate(columns):
            table.add_column(
                column,
                justify="right" if column in right else "left",
                no_wrap=number in unwrapped,
                overflow="fold",
            )
        for row in cells:
            table.add_row(*map(Text, row))
        # The table is drawn to a string first, because Rich would end the program at a broken pipe
        # and hide that a disk is full.
        drawn = io.StringIO()
        self._console(stream, drawn).print(table)
        lines = drawn.getvalue().splitlines()
        write_now(stream, "".join(f"{line.rstrip()}\n" for line in lines))

    def print_drawing(self, draw: Callable[[int, bool], str]) -> None:
        """Print the text that `draw` returns. `draw` is called with the width of the terminal in
        columns, and whether the terminal can show Unicode.
        """
        stream = sys.stderr if self.json else sys.stdout
        try:
            unicode = bool("█│●…".encode(stream.encoding))
        except (UnicodeEncodeError, TypeError):
            unicode = False
        self.text(draw(terminal_columns(stream), unicode))

    @contextmanager
    def bar(
        self,
        label: str,
        total: int | None,
        unit: Literal[
            "bytes", "tensors", "tests", "chunks", "sites", "lines", "requests", "answers"
        ] = "bytes",
        done: int = 0,
    ) -> Iterator[ProgressBar]:
        """Show a progress bar on stderr during the `with` block. If stderr is not a terminal, print
        one line at the end instead.

        `total`: the size of the task in `unit`; None: unknown. `done`: how much of it was finished
        before, such as the part of a resumed download.
        """
        label = escape_controls(label)
        if not sys.stderr.isatty():
            log_lines = _Lines(self, label)
            yield log_lines
            log_lines.close(total, unit)
            return
        with terminal_status.hidden(), self._rich_progress(unit) as progress:
            task = progress.add_task(label, total=total, completed=done)
            yield _RichBar(progress, task)

    def markdown(self, text: str) -> str:
        """Return Markdown `text` rendered for this terminal, as complete lines.

        The text was written by a model, so nothing in it may act on the terminal. Control
        characters are made visible, even if they are written as entities, and HTML and images are
        shown as source.
        """
        from rich.markdown import Markdown

        drawing = Markdown(escape_controls(text), hyperlinks=False, code_theme="ansi_dark")
        _show_as_text(drawing.parsed)
        drawn = io.StringIO()
        self._console(sys.stdout, drawn).print(drawing)
        lines = [line.rstrip() for line in drawn.getvalue().strip("\n").split("\n")]
        return "\n".join(lines) + "\n"

    def code(self, line: str, language: str) -> str:
        """Return one line of code with syntax highlighting, if `language` is known and colors are
        used. The line is not wrapped.
        """
        from rich.syntax import Syntax

        line = escape_controls(line)
        if not self.color or not line.strip():
            return line + "\n"
        drawn = io.StringIO()
        painted = Syntax("", language or "text", theme="ansi_dark").highlight(line)
        painted.rstrip()
        self._console(sys.stdout, drawn).print(painted, soft_wrap=True)
        return drawn.getvalue()

    def _rich_progress(self, unit: str) -> "Progress":
        """Return Rich's progress display for tasks that are measured in `unit`."""
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        counts = (
            (DownloadColumn(binary_units=True), TransferSpeedColumn())
            if unit == "bytes"
            else (MofNCompleteColumn(),)
        )
        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *counts,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console(sys.stderr),
            # A redraw thread would disturb measurements.
            auto_refresh=unit not in ("tests", "chunks", "requests"),
        )

    def _console(self, stream: TextIO, file: TextIO | None = None) -> "Console":
        """Return a Rich console that draws as `stream` can show it. It writes to `file`, or to
        `stream` by default.
        """
        from rich.console import Console

        terminal = stream.isatty()
        return Console(
            file=file or stream,
            force_terminal=terminal,
            width=None if terminal else MAX_COLUMNS,
            no_color=not self.color,
            highlight=False,
            markup=False,
            emoji=False,
        )


def _least_table_width(
    columns: Sequence[str], rows: Sequence[Sequence[str]], unwrapped: Collection[int]
) -> int:
    """Return the columns that a table needs at least. Cells of the columns `unwrapped` are not
    wrapped, and others get at least MIN_CELL_COLUMNS columns if they are that long.
    """
    total = 0
    for number, header in enumerate(columns):
        longest = max([text_columns(header), *(text_columns(row[number]) for row in rows)])
        total += longest if number in unwrapped else min(longest, MIN_CELL_COLUMNS)
    return total + COLUMN_GAP * (len(columns) - 1)


def _draw_paragraphs(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return the rows of a table as paragraphs: the first cell on a line of its own, and below it
    the other cells with their headers.
    """
    text = ""
    for row in rows:
        others = zip(columns[1:], row[1:], strict=True)
        details = " · ".join(
            f"{header} {cell}".strip() for header, cell in others if cell.strip() not in ("", "-")
        )
        text += f"{row[0].strip()}\n"
        text += "".join(f"  {line}\n" for line in wrap_text(details, width - 2).split("\n"))
    return text


class _RichBar:
    """A ProgressBar on a terminal, drawn by Rich."""

    def __init__(self, progress: "Progress", task: Any) -> None:
        self.progress, self.task = progress, task

    def advance(self, amount: int) -> None:
        self.progress.update(self.task, advance=amount, refresh=not self.progress.live.auto_refresh)

    def describe(self, text: str) -> None:
        self.progress.update(
            self.task,
            description=escape_controls(text),
            refresh=not self.progress.live.auto_refresh,
        )


class _Lines:
    """A ProgressBar without a terminal. It prints one line when the task has ended."""

    def __init__(self, ui: UI, label: str) -> None:
        self.ui, self.label, self.count = ui, label, 0

    def advance(self, amount: int) -> None:
        self.count += amount

    def describe(self, text: str) -> None:
        """Do nothing: only the end of the task is printed."""

    def close(self, total: int | None, unit: str) -> None:
        """Print the label and the size of the finished task."""
        amount = total if total is not None else self.count
        self.ui.note(
            f"{self.label}: " + (format_size(amount) if unit == "bytes" else f"{amount} {unit}")
        )


def _show_as_text(tokens: Iterable[Any]) -> None:
    """Change the tokens of parsed Markdown so that Rich shows HTML, images and control characters
    in them as plain text. Line breaks in a paragraph stay line breaks.
    """
    for token in tokens:
        token.content = escape_controls(token.content)
        if "href" in token.attrs:
            token.attrs["href"] = escape_controls(str(token.attrs["href"]))
        match token.type:
            case "html_inline":
                token.type = "text"
            case "html_block":
                token.type = "code_block"
            case "softbreak":
                token.type = "hardbreak"
            case "image":
                token.type, token.tag = "text", ""
                token.content = (
                    f"![{token.content}]({escape_controls(str(token.attrs.get('src', '')))})"
                )
                token.children = None
        _show_as_text(token.children or ())


def terminal_columns(stream: TextIO) -> int:
    """Return the current width in columns of the terminal to which `stream` writes."""
    if not sys.stdout.isatty():
        with suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns
    return shutil.get_terminal_size().columns


def wrap_line(text: str, stream: TextIO) -> str:
    """Return text with line breaks between words if `stream` is a terminal that is too narrow for
    it, otherwise unchanged.
    """
    return wrap_text(text, terminal_columns(stream)) if stream.isatty() else text


def write_now(stream: TextIO, text: str) -> None:
    """Write `text` to `stream` and flush it.

    Raises OutputClosed if the reader of a pipe has ended, and UserError for other errors, such as a
    full disk. Such an error of stderr is raised as OSError, because no message could be printed.
    """
    try:
        terminal_status.hide()
        stream.write(text)
        stream.flush()
        if text.endswith("\n"):
            terminal_status.draw()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        if stream is sys.stderr:
            raise
        raise UserError(
            f"cannot write the output: {error.strerror}",
            hint="free disk space, or write the output somewhere else",
        ) from None


def escape_controls(text: str) -> str:
    """Return `text` with visible characters in place of control characters, except tab and newline.
    Text from a model, a GGUF header or a server must not be printed without this.

    C0 and DEL become their Unicode pictures (U+2400…). C1, bidirectional overrides and other format
    characters that can reorder or hide text become U+FFFD.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_PICTURES)


def escape_json_controls(text: str) -> str:
    """Return a JSON text with \\u escapes in place of DEL, C1, the characters that can reorder or
    hide text, and bytes of file names that are not UTF-8, which json.dumps() leaves in strings. The
    value of the text stays the same.
    """
    return text if text.isascii() and "\x7f" not in text else text.translate(_JSON_ESCAPES)


_PICTURES: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(128, 160), "�"),
    **dict.fromkeys((8206, 8207, 1564, 8232, 8233, *range(8234, 8239), *range(8294, 8298)), "�"),
}
_FILE_NAME_BYTES = range(0xDC80, 0xDD00)  # the surrogates that stand for bytes
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in (*_PICTURES, *_FILE_NAME_BYTES) if code >= 0x7F}
