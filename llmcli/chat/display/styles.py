"""Terminal styles: dimming, probability colors, bars."""

import sys
from collections.abc import Sequence

from llmcli.ui import UI, escape_controls, write_now

DIM, RESET = "\x1b[2m", "\x1b[0m"


BAR_COLUMNS = 40


# Lower bounds of a token's probability, and the terminal color of each band.
PROBABILITY_BANDS = ((0.9, "≥90%"), (0.5, "≥50%"), (0.2, "≥20%"), (0.05, "≥5%"), (0.0, "less"))


BAND_COLORS = ("\x1b[32m", "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[31m")


def dim(text: str) -> str:
    """Dim text, except for trailing line breaks, so that the text still ends with them."""
    body = text.rstrip("\n")
    return f"{DIM}{body}{RESET}{text[len(body) :]}" if body else text


def has_color(ui: UI) -> bool:
    """Return whether stdout is a terminal that may be colored."""
    return ui.color and not ui.json and sys.stdout.isatty()


def print_shaded(parts: Sequence[tuple[str, float | None]]) -> None:
    """Print texts on one line, each in the color of its probability; None has no color."""
    line = ""
    for text, probability in parts:
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
    """Replace control characters, line breaks and tabs by pictures, so that a text fits a table
    cell.
    """
    return escape_controls(text).replace("\n", "␊").replace("\t", "␉")


def draw_bar(parts: Sequence[tuple[str, float]], total: float, width: int = BAR_COLUMNS) -> str:
    """Draw (character, amount) parts as a bar of `width` columns that stand for `total`.

    A part above 0 gets at least one column.
    """
    line = ""
    for character, amount in parts:
        columns = max(1, round(amount / total * width)) if amount > 0 and total else 0
        line += character * min(width - len(line), columns)
    return line
