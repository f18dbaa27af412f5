"""A line at the bottom of the terminal that says what the program is doing, such as loading a
model. It disappears when that has ended.

Other output appears above the line: `write_now` of ui.py hides it before, and draws it again
afterwards. There is one terminal, so there is one line. Without a terminal nothing is shown.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from llmcli.config import has_cursor_control
from llmcli.word_wrap import text_columns

ERASE_LINE = "\r\x1b[K"
_current_text = ""  # "" for none


def show(text: str) -> None:
    """Show `text`, which must not contain control characters, until `end` is called."""
    global _current_text
    hide()
    _current_text = text
    if sys.stderr.isatty() and not has_cursor_control():
        _write(f"{text}\n")
    draw()


def end() -> None:
    """Hide the line, because what it says has ended."""
    global _current_text
    hide()
    _current_text = ""


@contextmanager
def hidden() -> Iterator[None]:
    """Hide the line during the `with` block, in which something else draws on the terminal."""
    hide()
    try:
        yield
    finally:
        draw()


def hide() -> None:
    """Erase the line from the terminal. `draw` shows it again."""
    if _can_draw():
        _write(ERASE_LINE)


def draw() -> None:
    """Draw the line, cut to the width of the terminal."""
    if _can_draw():
        text, columns = _current_text, shutil.get_terminal_size().columns
        while text_columns(text) >= columns:
            text = text[:-1]
        _write(text)


def _can_draw() -> bool:
    """Return whether there is a line, and stderr is a terminal on which it can be erased."""
    return bool(_current_text) and sys.stderr.isatty() and has_cursor_control()


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
