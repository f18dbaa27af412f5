"""Dim, colours, bars."""

import sys
from collections.abc import Sequence

from llmcli.ui import UI, put, visible

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


WIDTH = 40


# A token at least as likely as that, and its colour: of the sixteen that every terminal has.
BANDS = ((0.9, "≥90%"), (0.5, "≥50%"), (0.2, "≥20%"), (0.05, "≥5%"), (0.0, "less"))


SHADES = ("\x1b[32m", "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[31m")


def dimmed(text: str) -> str:
    """Shown text, dimmed; a line's end stays outside, so that whoever looks finds it last."""
    body = text.rstrip("\n")
    return f"{DIM}{body}{PLAIN}{text[len(body) :]}" if body else text


def colored(ui: UI) -> bool:
    """Whether stdout is a terminal that may be coloured."""
    return ui.color and not ui.json and sys.stdout.isatty()


def shaded(parts: Sequence[tuple[str, float | None]]) -> None:
    """Texts on a terminal, each in the colour of its probability; None has none."""
    line = ""
    for text, share in parts:
        if share is None:
            line += visible(text)
        else:
            shade = next(
                shade for shade, (least, _) in zip(SHADES, BANDS, strict=True) if share >= least
            )
            line += f"{shade}{visible(text)}{PLAIN}"
    put(sys.stdout, line + "\n")


def one_line(text: str) -> str:
    """A token's text in a table cell: line breaks and tabs as their pictures, too."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def bar(parts: Sequence[tuple[str, float]], total: float, width: int = WIDTH) -> str:
    """`parts` of (character, amount) as a bar of `width` for `total`; a part above 0 gets at least
    one column.
    """
    line = ""
    for character, amount in parts:
        columns = max(1, round(amount / total * width)) if amount > 0 and total else 0
        line += character * min(width - len(line), columns)
    return line
