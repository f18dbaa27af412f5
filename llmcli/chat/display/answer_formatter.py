"""Formats an answer's text for a terminal: thinking dimmed, folded or hidden; Markdown rendered."""

import sys
import time

from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW, DisplaySettings
from llmcli.chat.display.markdown import MarkdownRenderer, MarkdownStream
from llmcli.chat.display.styles import DIM, RESET, dim
from llmcli.runtime.text.reasoning import ThinkingPiece, ThinkingSplitter, ThinkingTags
from llmcli.ui import UI, escape_controls


class AnswerFormatter:
    """Formats one answer.

    `thinking` is SHOW, FOLD or HIDE. `color` allows dimming. `renderer` renders Markdown; without
    one, text stays as it is.
    """

    def __init__(
        self, thinking: str, color: bool, renderer: MarkdownRenderer | None = None
    ) -> None:
        self._thinking, self._color, self._renderer = thinking, color, renderer
        self._blocks = MarkdownStream(renderer) if renderer else None
        self._splitter = ThinkingSplitter()
        self._steps, self._since = 0, 0.0
        self._hides_thinking = False  # thinking was hidden, and no content has been shown since
        self._has_thinking_line = False  # the current line contains shown thinking

    def begin(self, opened: ThinkingTags | None) -> None:
        """Begin an answer; `opened` are the thinking tags that its prompt opened."""
        self._splitter = ThinkingSplitter(opened)
        self._blocks = MarkdownStream(self._renderer) if self._renderer else None
        self._steps, self._since, self._hides_thinking, self._has_thinking_line = (
            0,
            0.0,
            False,
            False,
        )

    @property
    def is_passthrough(self) -> bool:
        """Whether all further text is shown unchanged."""
        return self._splitter.is_replying and not self._hides_thinking and not self._blocks

    def feed(self, text: str) -> str:
        """Format one token's text. Call it for empty texts, too, because it counts the tokens."""
        if not self._since:
            self._since = time.perf_counter()
        self._steps += not self._splitter.is_replying
        return self._shown(self._splitter.feed(text))

    def finish(self) -> str:
        """Return the text that was held back, and end the fold line if thinking did not end."""
        shown = self._shown(self._splitter.finish())
        if self._hides_thinking and not self._splitter.is_replying:
            shown += self._unfold()
        return shown + (self._separate(self._blocks.finish()) if self._blocks else "")

    def _shown(self, pieces: list[ThinkingPiece]) -> str:
        return "".join(
            self._format_thinking(piece.text)
            if piece.is_thinking
            else self._format_content(piece.text)
            for piece in pieces
        )

    def _format_thinking(self, text: str) -> str:
        if self._thinking == SHOW:
            self._has_thinking_line = True
            return dim(escape_controls(text)) if self._color else escape_controls(text)
        is_first, self._hides_thinking = not self._hides_thinking, True
        if self._thinking == HIDE:
            return ""
        shown = self._dim("(thinking") if is_first else ""
        return shown + (self._unfold() if self._splitter.is_replying else "")

    def _unfold(self) -> str:
        """Return the end of the line that is shown instead of folded thinking."""
        if self._thinking != FOLD:
            return ""
        seconds = time.perf_counter() - self._since
        return self._dim(f" for {self._steps} tokens, {seconds:.1f} s: /think shows it)") + "\n"

    def _format_content(self, text: str) -> str:
        if self._hides_thinking:
            text = text.lstrip()
            self._hides_thinking = not text
        return self._separate(self._blocks.feed(text)) if self._blocks else escape_controls(text)

    def _separate(self, drawn: str) -> str:
        """Return rendered content, separated from the thinking that was shown before it.

        The separating blank line is added here, because rendering drops leading blank lines.
        """
        if drawn and self._has_thinking_line:
            self._has_thinking_line, drawn = False, f"\n\n{drawn}"
        return drawn

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{RESET}" if self._color else text


def open_formatter(display: DisplaySettings, ui: UI) -> AnswerFormatter | None:
    """Return the formatter for stdout, or None if it would not change any text."""
    terminal = sys.stdout.isatty() and not ui.json
    thinking = HIDE if display.thinking == FOLD and not terminal else display.thinking
    drawer = ui if display.markdown and terminal else None
    if thinking == SHOW and not (terminal and ui.color) and not drawer:
        return None
    if drawer:
        drawer.markdown("")  # loads the renderer before the answer begins
    return AnswerFormatter(thinking, terminal and ui.color, drawer)
