"""Splits streamed Markdown into pieces that can be rendered as soon as they are complete.

A paragraph, a table or a list item is rendered at its end, code line by line. Nothing is drawn
twice, so the cursor never moves back.
"""

import re
from typing import Protocol

from llmcli.chat.display.styles import dim
from llmcli.ui import escape_controls

FENCE_PATTERN = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)$")
ITEM_PATTERN = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?: |$)")
HEADING_PATTERN = re.compile(r" {0,3}#{1,6}(?: |$)")
# a line after a blank one that still belongs to the list item
CONTINUATION_PATTERN = re.compile(r"  |\t")


class MarkdownRenderer(Protocol):
    """Renders pieces of Markdown for a terminal."""

    @property
    def color(self) -> bool: ...

    def markdown(self, text: str) -> str:
        """Render a complete piece, ending with a line break."""
        ...

    def code(self, line: str, language: str) -> str:
        """Render one line of code, ending with a line break."""
        ...


class MarkdownStream:
    """The Markdown of one answer, rendered piece by piece."""

    def __init__(self, renderer: MarkdownRenderer) -> None:
        self._renderer = renderer
        self._line = ""
        self._pending: list[str] = []
        self._fence, self._language = "", ""
        self._gap = self._begun = False  # _gap: a blank line is due; _begun: something was drawn

    def feed(self, text: str) -> str:
        """Add text; return what can be drawn now."""
        *lines, self._line = (self._line + text).split("\n")
        return "".join(self._add_line(line) for line in lines)

    def finish(self) -> str:
        """End the answer: return the rest of its text, rendered."""
        line, self._line = self._line, ""
        return (self._add_line(line) if line else "") + self._flush()

    def _add_line(self, line: str) -> str:
        if self._fence:
            return self._code(line)
        if not line.strip():
            if self._listing:
                self._pending.append("")
                return ""
            drawn = self._flush()
            self._gap = True
            return drawn
        loose = bool(self._pending) and not self._pending[-1]
        if self._listing and CONTINUATION_PATTERN.match(line):
            self._pending.append(line)
            return ""
        item, heading, fence = (
            ITEM_PATTERN.match(line),
            HEADING_PATTERN.match(line),
            FENCE_PATTERN.match(line),
        )
        drawn = self._flush() if loose or item or heading or fence else ""
        self._gap = self._gap or loose or bool(heading)
        if fence:
            self._fence, self._language = fence[1], fence[2].strip().partition(" ")[0]
            return drawn + self._join_drawn(self._draw_fence(line))
        self._pending.append(line)
        if not heading:
            return drawn
        drawn += self._flush()
        self._gap = True
        return drawn

    @property
    def _listing(self) -> bool:
        return bool(self._pending and ITEM_PATTERN.match(self._pending[0]))

    def _code(self, line: str) -> str:
        closing = line.strip()
        if (
            len(line) - len(line.lstrip()) < 4
            and closing.startswith(self._fence)
            and set(closing) == {self._fence[0]}
        ):
            self._fence, self._gap = "", True
            return self._draw_fence(line)
        return self._renderer.code(line, self._language)

    def _draw_fence(self, line: str) -> str:
        """Draw a fence line, which separates code from text where there are no colors."""
        return (
            dim(escape_controls(line)) if self._renderer.color else escape_controls(line)
        ) + "\n"

    def _flush(self) -> str:
        text, self._pending = "\n".join(self._pending).strip("\n"), []
        return self._join_drawn(self._renderer.markdown(text)) if text else ""

    def _join_drawn(self, drawn: str) -> str:
        gap, self._gap = self._gap and self._begun, False
        self._begun = True
        return "\n" * gap + drawn
