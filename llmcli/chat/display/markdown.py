"""Splits Markdown that arrives token by token into blocks, and renders each block as soon as it is
complete.

A paragraph, a table or a list item is rendered when it ends, and code after each line. Rendered
text is never replaced, so that the terminal's cursor need not move back.
"""

import re
from typing import Protocol

from llmcli.chat.display.styles import dim
from llmcli.ui import escape_controls

FENCE_PATTERN = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)$")
ITEM_PATTERN = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?: |$)")
HEADING_PATTERN = re.compile(r" {0,3}#{1,6}(?: |$)")
# A line after a blank line that still belongs to the list item.
CONTINUATION_PATTERN = re.compile(r"  |\t")


class MarkdownRenderer(Protocol):
    """Renders blocks of Markdown for a terminal. Implemented by UI."""

    @property
    def color(self) -> bool: ...

    def markdown(self, text: str) -> str:
        """Return a complete block as rendered text that ends with a line break."""
        ...

    def code(self, line: str, language: str) -> str:
        """Return one line of a code block, highlighted for `language`, with a line break."""
        ...


class MarkdownStream:
    """Renders the Markdown of one answer while it arrives. feed() adds text, and finish() ends the
    answer.
    """

    def __init__(self, renderer: MarkdownRenderer) -> None:
        self._renderer = renderer
        self._line = ""
        self._pending: list[str] = []
        self._fence, self._language = "", ""
        self._needs_blank_line = False  # before the next block
        self._has_output = False  # a block was rendered already

    def feed(self, text: str) -> str:
        """Add text in pieces of any length. Return the rendered text of the blocks that are now
        complete.
        """
        *lines, self._line = (self._line + text).split("\n")
        return "".join(self._add_line(line) for line in lines)

    def finish(self) -> str:
        """End the answer. Return the rendered text of the last, incomplete block."""
        line, self._line = self._line, ""
        return (self._add_line(line) if line else "") + self._flush()

    def _add_line(self, line: str) -> str:
        """Add one line without its line break. Return the rendered text of the blocks that it
        completes.
        """
        if self._fence:
            return self._add_code_line(line)
        if not line.strip():
            if self._is_in_list:
                self._pending.append("")
                return ""
            output = self._flush()
            self._needs_blank_line = True
            return output
        follows_blank_line = bool(self._pending) and not self._pending[-1]
        if self._is_in_list and CONTINUATION_PATTERN.match(line):
            self._pending.append(line)
            return ""
        item, heading, fence = (
            ITEM_PATTERN.match(line),
            HEADING_PATTERN.match(line),
            FENCE_PATTERN.match(line),
        )
        output = self._flush() if follows_blank_line or item or heading or fence else ""
        self._needs_blank_line = self._needs_blank_line or follows_blank_line or bool(heading)
        if fence:
            self._fence, self._language = fence[1], fence[2].strip().partition(" ")[0]
            return output + self._separate(self._draw_fence(line))
        self._pending.append(line)
        if not heading:
            return output
        output += self._flush()
        self._needs_blank_line = True
        return output

    @property
    def _is_in_list(self) -> bool:
        """Whether the current block is a list item."""
        return bool(self._pending and ITEM_PATTERN.match(self._pending[0]))

    def _add_code_line(self, line: str) -> str:
        """Return a rendered line of a code block. It may be the fence that ends the block."""
        closing = line.strip()
        if (
            len(line) - len(line.lstrip()) < 4
            and closing.startswith(self._fence)
            and set(closing) == {self._fence[0]}
        ):
            self._fence, self._needs_blank_line = "", True
            return self._draw_fence(line)
        return self._renderer.code(line, self._language)

    def _draw_fence(self, line: str) -> str:
        """Return a fence line of a code block, dimmed. It shows where code begins and ends even
        without colors.
        """
        return (
            dim(escape_controls(line)) if self._renderer.color else escape_controls(line)
        ) + "\n"

    def _flush(self) -> str:
        """End the current block and return its rendered text."""
        text, self._pending = "\n".join(self._pending).strip("\n"), []
        return self._separate(self._renderer.markdown(text)) if text else ""

    def _separate(self, output: str) -> str:
        """Return a rendered block, with a blank line before it if one is needed."""
        gap, self._needs_blank_line = self._needs_blank_line and self._has_output, False
        self._has_output = True
        return "\n" * gap + output
