"""The one sink for people and programs: text, tables, progress, errors; or one JSON document.

With `json=True` stdout carries exactly one document and everything else goes to stderr.
Rich is imported when something is drawn, not before: `--help` stays fast.
"""

import io
import json as json_module
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from llmcli.errors import ReaderGone, UserError
from llmcli.types import Bar
from llmcli.units import size as size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@dataclass(frozen=True)
class UI:
    """Where output goes. `color` False (NO_COLOR, or no terminal) draws plain text."""

    json: bool = False
    color: bool = True

    def text(self, line: str = "") -> None:
        """One line for people; under --json it goes to stderr."""
        put(sys.stderr if self.json else sys.stdout, visible(line) + "\n")

    def note(self, text: str) -> None:
        """One line on stderr that is neither a result nor an error."""
        put(sys.stderr, visible(text) + "\n")

    def warn(self, text: str) -> None:
        """One line on stderr about something the user should know."""
        self.note(f"warning: {text}")

    def error(self, message: str, hint: str = "") -> None:
        """`error: …` and `hint: …` on stderr, one line each."""
        self.note("error: " + " ".join(message.split()))
        if hint:
            self.note("hint: " + " ".join(hint.split()))

    def result(self, document: Any) -> None:
        """The one JSON document of a --json run."""
        put(sys.stdout, json_module.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
    ) -> None:
        """A table for people; the columns named in `right` are aligned to the right."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold" if self.color else "")
        for number, column in enumerate(columns):
            # What the first column names is typed again: on a narrow screen it goes on below and is
            # never cut.
            table.add_column(
                column,
                justify="right" if column in right else "left",
                no_wrap=column in right,
                overflow="ellipsis" if number else "fold",
            )
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        stream = sys.stderr if self.json else sys.stdout
        drawn = (
            io.StringIO()
        )  # rich ends the program at a broken pipe, and a full disk is ours to tell
        self._console(stream, drawn).print(table)
        put(stream, drawn.getvalue())

    def drawing(self, draw: Callable[[int, bool], str]) -> None:
        """What `draw` makes of the columns there are, and of whether all letters can be shown, not
        ASCII alone.
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
    ) -> Iterator[Bar]:
        """A progress bar on stderr: drawn on a terminal, one closing line elsewhere.

        `done` is what was there before (a resumed download); the bar never runs backwards.
        """
        label = visible(label)
        if not sys.stderr.isatty():
            quiet = _Lines(self, label)
            yield quiet
            quiet.close(total, unit)
            return
        with self._progress(unit) as progress:
            task = progress.add_task(label, total=total, completed=done)
            yield _RichBar(progress, task)

    def markdown(self, text: str) -> str:
        """Markdown as this terminal shows it, its lines ended. What a model writes cannot do more
        than that: control characters are shown, also those spelled as entities; HTML and images
        stay as they are written.
        """
        from rich.markdown import Markdown

        drawing = Markdown(visible(text), hyperlinks=False, code_theme="ansi_dark")
        _tame(drawing.parsed)
        drawn = io.StringIO()
        self._console(sys.stdout, drawn).print(drawing)
        lines = [line.rstrip() for line in drawn.getvalue().strip("\n").split("\n")]
        return "\n".join(lines) + "\n"

    def code(self, line: str, language: str) -> str:
        """One line of code in its language's colours, where it is known; long ones are the
        terminal's to wrap.
        """
        from rich.syntax import Syntax

        line = visible(line)
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
            # A thread that redraws would be measured along with the test.
            auto_refresh=unit not in ("tests", "chunks", "requests"),
        )

    def _console(self, stream: TextIO, file: TextIO | None = None) -> "Console":
        """A console as fits `stream`, which writes to `file` (else to `stream` itself)."""
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
            self.task, description=visible(text), refresh=not self.progress.live.auto_refresh
        )


class _Lines:
    """Progress where nobody watches: one line when it is over."""

    def __init__(self, ui: UI, label: str) -> None:
        self.ui, self.label, self.count = ui, label, 0

    def advance(self, amount: int) -> None:
        self.count += amount

    def describe(self, text: str) -> None:
        """What is being done right now is of no use to a log."""

    def close(self, total: int | None, unit: str) -> None:
        amount = total if total is not None else self.count
        self.ui.note(f"{self.label}: " + (size(amount) if unit == "bytes" else f"{amount} {unit}"))


def _tame(tokens: Iterable[Any]) -> None:
    """Parsed Markdown whose every piece is text that can be shown, and whose lines end where the
    writer ended them.
    """
    for token in tokens:
        token.content = visible(token.content)
        if "href" in token.attrs:
            token.attrs["href"] = visible(str(token.attrs["href"]))
        match token.type:
            case "html_inline":
                token.type = "text"
            case "html_block":
                token.type = "code_block"
            case "softbreak":
                token.type = "hardbreak"
            case "image":
                token.type, token.tag = "text", ""
                token.content = f"![{token.content}]({visible(str(token.attrs.get('src', '')))})"
                token.children = None
        _tame(token.children or ())


def put(stream: TextIO, text: str) -> None:
    """Write at once; raises UserError where the disk behind the stream is full, ReaderGone at a
    broken pipe.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        if stream is sys.stderr:
            raise  # there is no place left to tell it
        raise UserError(
            f"cannot write the output: {error.strerror}",
            hint="make room, or send it somewhere else",
        ) from None


def visible(text: str) -> str:
    """Show control characters instead of obeying them; tab and newline pass.

    C0 and DEL become their pictures (U+2400…), C1, bidirectional overrides and other format
    characters that can reorder or hide text become U+FFFD. Text of a model, of a GGUF header or
    of a server goes through here before it reaches a terminal.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_PICTURES)


_PICTURES: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(128, 160), "�"),
    **dict.fromkeys((8206, 8207, 1564, 8232, 8233, *range(8234, 8239), *range(8294, 8298)), "�"),
}
