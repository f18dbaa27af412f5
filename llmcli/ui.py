"""The only output channel: text, tables, progress and errors for people, or one JSON document.

With `json=True`, stdout carries exactly one document and everything else goes to stderr. Rich is
imported only when something is drawn, so that `--help` stays fast.
"""

import io
import json as json_module
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from llmcli.errors import OutputClosed, UserError
from llmcli.types import ProgressBar
from llmcli.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@dataclass(frozen=True)
class UI:
    """Output settings. `color` False (NO_COLOR, or no terminal) draws plain text."""

    json: bool = False
    color: bool = True

    def text(self, line: str = "") -> None:
        """Print one line; with --json it goes to stderr."""
        write_now(sys.stderr if self.json else sys.stdout, escape_controls(line) + "\n")

    def note(self, text: str) -> None:
        """Print one line on stderr that is neither a result nor an error."""
        write_now(sys.stderr, escape_controls(text) + "\n")

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        self.note(f"warning: {text}")

    def error(self, message: str, hint: str = "") -> None:
        """Print `error: …` and `hint: …` on stderr, one line each."""
        self.note("error: " + " ".join(message.split()))
        if hint:
            self.note("hint: " + " ".join(hint.split()))

    def result(self, document: Any) -> None:
        """Print the JSON document of a --json run."""
        write_now(
            sys.stdout, json_module.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
        )

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
    ) -> None:
        """Print a table. `right` names the columns that are aligned to the right."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold" if self.color else "")
        for number, column in enumerate(columns):
            # Users copy the first column to type it again: on a narrow screen it wraps instead of
            # being cut.
            table.add_column(
                column,
                justify="right" if column in right else "left",
                no_wrap=column in right,
                overflow="ellipsis" if number else "fold",
            )
        for row in rows:
            table.add_row(*(Text(escape_controls(cell)) for cell in row))
        stream = sys.stderr if self.json else sys.stdout
        # Rich exits at a broken pipe, and a full disk must be reported: draw to a string, then
        # write.
        drawn = io.StringIO()
        self._console(stream, drawn).print(table)
        write_now(stream, drawn.getvalue())

    def print_drawing(self, draw: Callable[[int, bool], str]) -> None:
        """Print the result of `draw`, which gets the terminal's width in columns and whether
        Unicode can be shown.
        """
        stream = sys.stderr if self.json else sys.stdout
        try:
            unicode = bool("█│●…".encode(stream.encoding))
        except (UnicodeEncodeError, TypeError):
            unicode = False
        self.text(draw(shutil.get_terminal_size().columns, unicode))

    @contextmanager
    def bar(
        self,
        label: str,
        total: int | None,
        unit: Literal[
            "bytes", "tensors", "tests", "chunks", "sites", "lines", "requests"
        ] = "bytes",
        done: int = 0,
    ) -> Iterator[ProgressBar]:
        """Show a progress bar on stderr; without a terminal, print one line at the end.

        `done` is the amount that was already complete, such as a resumed download.
        """
        label = escape_controls(label)
        if not sys.stderr.isatty():
            quiet = _Lines(self, label)
            yield quiet
            quiet.close(total, unit)
            return
        with self._progress(unit) as progress:
            task = progress.add_task(label, total=total, completed=done)
            yield _RichBar(progress, task)

    def markdown(self, text: str) -> str:
        """Render Markdown for this terminal, as complete lines.

        The text comes from a model: control characters are made visible, also when written as
        entities; HTML and images are shown as source.
        """
        from rich.markdown import Markdown

        drawing = Markdown(escape_controls(text), hyperlinks=False, code_theme="ansi_dark")
        _tame(drawing.parsed)
        drawn = io.StringIO()
        self._console(sys.stdout, drawn).print(drawing)
        lines = [line.rstrip() for line in drawn.getvalue().strip("\n").split("\n")]
        return "\n".join(lines) + "\n"

    def code(self, line: str, language: str) -> str:
        """Highlight one line of code, if its language is known. The terminal wraps long lines."""
        from rich.syntax import Syntax

        line = escape_controls(line)
        if not self.color or not line.strip():
            return line + "\n"
        drawn = io.StringIO()
        painted = Syntax("", language or "text", theme="ansi_dark").highlight(line)
        painted.rstrip()
        self._console(sys.stdout, drawn).print(painted, soft_wrap=True)
        return drawn.getvalue()

    def _progress(self, unit: str) -> "Progress":
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
        """Return a console that matches `stream` and writes to `file` (default: `stream`)."""
        from rich.console import Console

        terminal = stream.isatty()
        return Console(
            file=file or stream,
            force_terminal=terminal,
            width=None if terminal else 200,
            no_color=not self.color,
            highlight=False,
            markup=False,
            emoji=False,
        )


class _RichBar:
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
    """Progress without a terminal: one line at the end."""

    def __init__(self, ui: UI, label: str) -> None:
        self.ui, self.label, self.count = ui, label, 0

    def advance(self, amount: int) -> None:
        self.count += amount

    def describe(self, text: str) -> None:
        """Do nothing: a log needs no intermediate state."""

    def close(self, total: int | None, unit: str) -> None:
        amount = total if total is not None else self.count
        self.ui.note(
            f"{self.label}: " + (format_size(amount) if unit == "bytes" else f"{amount} {unit}")
        )


def _tame(tokens: Iterable[Any]) -> None:
    """Change parsed Markdown so that all of its content is shown as text.

    Line breaks are kept.
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
        _tame(token.children or ())


def write_now(stream: TextIO, text: str) -> None:
    """Write and flush `text`.

    Raises OutputClosed if the pipe is closed, and UserError for other errors, such as a full disk;
    an OSError of stderr is not converted.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        if stream is sys.stderr:
            raise  # stderr: an error message could not be printed either
        raise UserError(
            f"cannot write the output: {error.strerror}",
            hint="free disk space, or write the output somewhere else",
        ) from None


def escape_controls(text: str) -> str:
    """Replace control characters by visible ones; tab and newline stay.

    C0 and DEL are replaced by their pictures (U+2400…). C1, bidirectional overrides and other
    format characters that can reorder or hide text are replaced by U+FFFD. Text from a model, a
    GGUF header or a server must be passed through this function before it is printed.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_PICTURES)


_PICTURES: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(128, 160), "�"),
    **dict.fromkeys((8206, 8207, 1564, 8232, 8233, *range(8234, 8239), *range(8294, 8298)), "�"),
}
