"""Styles of terminal output: dimmed text, text colored by probability, and bars."""

import sys
from collections.abc import Sequence

from llmcli.ui import UI, escape_controls, write_now

DIM, RESET = "\x1b[2m", "\x1b[0m"
BAR_COLUMNS = 40
# Bands of a token's probability (lower bound, name), and the terminal color of each band.
PROBABILITY_BANDS = ((0.9, "≥90%"), (0.5, "≥50%"), (0.2, "≥20%"), (0.05, "≥5%"), (0.0, "less"))
BAND_COLORS = ("\x1b[32m", "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[31m")


def dim(text: str) -> str:
    """Return the text with escape sequences that dim it. Line breaks at its end stay outside of
    these, so that callers can see where a line ends.
    """
    body = text.rstrip("\n")
    return f"{DIM}{body}{RESET}{text[len(body) :]}" if body else text


def has_color(ui: UI) -> bool:
    """Return whether stdout is a terminal and colors are allowed."""
    return ui.color and not ui.json and sys.stdout.isatty()


def print_shaded(pieces: Sequence[tuple[str, float | None]]) -> None:
    """Print (text, probability) pairs one after another, each text in the color of its probability.
    A text with the probability None has no color.
    """
    line = ""
    for text, probability in pieces:
        if probability is None:
            line += escape_controls(text)
        else:
            color = next(
                color
                for color, (lower_bound, _) in zip(BAND_COLORS, PROBABILITY_BANDS, strict=True)
                if probability >= lower_bound
            )
            line += f"{color}{escape_controls(text)}{RESET}"
    write_now(sys.stdout, line + "\n")


def escape_line(text: str) -> str:
    """Return a text on one line, for a table cell: control characters, line breaks and tabs are
    replaced by visible symbols.
    """
    return escape_controls(text).replace("\n", "␊").replace("\t", "␉")


def draw_bar(pieces: Sequence[tuple[str, float]], total: float, width: int = BAR_COLUMNS) -> str:
    """Draw a bar of (character, amount) pieces one after another. `width` columns stand for the
    amount `total`. A piece with an amount above 0 gets at least one column.
    """
    line = ""
    for character, amount in pieces:
        columns = max(1, round(amount / total * width)) if amount > 0 and total else 0
        line += character * min(width - len(line), columns)
    return line
