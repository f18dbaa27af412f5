"""Terminal styles: dimming, probability colors, bars."""

import sys
from collections.abc import Sequence

from llmcli.ui import UI, put, visible

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


WIDTH = 40


# Lower bounds of a token's probability, and the terminal color of each band.
BANDS = ((0.9, "≥90%"), (0.5, "≥50%"), (0.2, "≥20%"), (0.05, "≥5%"), (0.0, "less"))


SHADES = ("\x1b[32m", "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[31m")


def dimmed(text: str) -> str:
    """Dim text, except for trailing line breaks, so that the text still ends with them."""
    body = text.rstrip("\n")
    return f"{DIM}{body}{PLAIN}{text[len(body) :]}" if body else text


def colored(ui: UI) -> bool:
    """Return whether stdout is a terminal that may be colored."""
    return ui.color and not ui.json and sys.stdout.isatty()


def shaded(parts: Sequence[tuple[str, float | None]]) -> None:
    """Print texts on one line, each in the color of its probability; None has no color."""
    line = ""
    for text, probability in parts:
        if probability is None:
            line += visible(text)
        else:
            color = next(
                color
                for color, (lower_bound, _) in zip(SHADES, BANDS, strict=True)
                if probability >= lower_bound
            )
            line += f"{color}{visible(text)}{PLAIN}"
    put(sys.stdout, line + "\n")


def one_line(text: str) -> str:
    """Make a token's text fit a table cell: line breaks and tabs become pictures, too."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def bar(parts: Sequence[tuple[str, float]], total: float, width: int = WIDTH) -> str:
    """Draw (character, amount) parts as a bar of `width` columns that stand for `total`.

    A part above 0 gets at least one column.
    """
    line = ""
    for character, amount in parts:
        columns = max(1, round(amount / total * width)) if amount > 0 and total else 0
        line += character * min(width - len(line), columns)
    return line
