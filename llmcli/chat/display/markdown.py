"""Splits streamed Markdown into pieces that can be rendered as soon as they are complete.

A paragraph, a table or a list item is rendered at its end, code line by line. Nothing is drawn
twice, so the cursor never moves back.
"""

import re
from typing import Protocol

from llmcli.chat.display.styles import dimmed
from llmcli.ui import visible

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)$")
ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?: |$)")
HEADING = re.compile(r" {0,3}#{1,6}(?: |$)")
INSIDE = re.compile(r"  |\t")  # a line after a blank one that still belongs to the list item


class Drawer(Protocol):
    """Renders pieces of Markdown for a terminal."""

    @property
    def color(self) -> bool: ...

    def markdown(self, text: str) -> str:
        """Render a complete piece, ending with a line break."""
        ...

    def code(self, line: str, language: str) -> str:
        """Render one line of code, ending with a line break."""
        ...


class Blocks:
    """The Markdown of one answer, rendered piece by piece."""

    def __init__(self, drawer: Drawer) -> None:
        self._drawer = drawer
        self._line = ""
        self._held: list[str] = []
        self._fence, self._language = "", ""
        self._gap = self._begun = False  # a blank line is due; something was drawn

    def feed(self, text: str) -> str:
        """Add text; return what can be drawn now."""
        *lines, self._line = (self._line + text).split("\n")
        return "".join(self._take(line) for line in lines)

    def finish(self) -> str:
        """Return what was held back, at the end of the answer."""
        line, self._line = self._line, ""
        return (self._take(line) if line else "") + self._flush()

    def _take(self, line: str) -> str:
        if self._fence:
            return self._code(line)
        if not line.strip():
            if self._listing:
                self._held.append("")
                return ""
            drawn = self._flush()
            self._gap = True
            return drawn
        loose = bool(self._held) and not self._held[-1]
        if self._listing and INSIDE.match(line):
            self._held.append(line)
            return ""
        item, heading, fence = ITEM.match(line), HEADING.match(line), FENCE.match(line)
        drawn = self._flush() if loose or item or heading or fence else ""
        self._gap = self._gap or loose or bool(heading)
        if fence:
            self._fence, self._language = fence[1], fence[2].strip().partition(" ")[0]
            return drawn + self._put(self._edge(line))
        self._held.append(line)
        if not heading:
            return drawn
        drawn += self._flush()
        self._gap = True
        return drawn

    @property
    def _listing(self) -> bool:
        return bool(self._held and ITEM.match(self._held[0]))

    def _code(self, line: str) -> str:
        closing = line.strip()
        if (
            len(line) - len(line.lstrip()) < 4
            and closing.startswith(self._fence)
            and set(closing) == {self._fence[0]}
        ):
            self._fence, self._gap = "", True
            return self._edge(line)
        return self._drawer.code(line, self._language)

    def _edge(self, line: str) -> str:
        """Draw a fence line, which separates code from text where there are no colors."""
        return (dimmed(visible(line)) if self._drawer.color else visible(line)) + "\n"

    def _flush(self) -> str:
        held, self._held = "\n".join(self._held).strip("\n"), []
        return self._put(self._drawer.markdown(held)) if held else ""

    def _put(self, drawn: str) -> str:
        gap, self._gap = self._gap and self._begun, False
        self._begun = True
        return "\n" * gap + drawn
