"""Writes a generated page of docs/, or checks that it is current."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def update_page(usage: str, page: Path, build: Callable[[], str]) -> None:
    """Write the text that `build` returns into a page, as the arguments of the program say. `usage`:
    the docstring of the program, whose paragraphs after the first are its help. With --check nothing
    is written, and the program exits with 1 if the page is out of date.
    """
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(inspect.cleandoc(usage).split("\n\n", 1)[1])
        return
    text = build()
    if "--check" in sys.argv[1:]:
        if page.read_text(encoding="utf-8") != text:
            sys.exit(f"{page.relative_to(ROOT)} is out of date: run {sys.argv[0]}")
        return
    page.write_text(text, encoding="utf-8")
