"""Formats the text of an answer for a terminal, token by token. Thinking is dimmed, replaced by one
line, or hidden, lines are wrapped between words, and Markdown is rendered.
"""

import sys
import time

from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW, DisplaySettings
from llmcli.chat.display.markdown import MarkdownRenderer, MarkdownStream
from llmcli.chat.display.styles import DIM, RESET, dim
from llmcli.runtime.text.reasoning import ThinkingPiece, ThinkingSplitter, ThinkingTags
from llmcli.ui import UI, escape_controls, terminal_columns
from llmcli.word_wrap import WordWrapper


class AnswerFormatter:
    """Formats answers, one after the other. begin() starts an answer, feed() formats the text of
    each token, and finish() ends the answer.

    `thinking`: how thinking is displayed: SHOW, FOLD (into one line) or HIDE. `color`: whether the
    output may contain escape sequences for dimming. `renderer`: renders Markdown; None leaves
    Markdown unchanged. `wrapper`: wraps what is not rendered; None leaves lines as they are.
    """

    def __init__(
        self,
        thinking: str,
        color: bool,
        renderer: MarkdownRenderer | None = None,
        wrapper: WordWrapper | None = None,
    ) -> None:
        self._thinking, self._color, self._renderer = thinking, color, renderer
        self._wrapper = wrapper
        self._markdown = MarkdownStream(renderer) if renderer else None
        self._splitter = ThinkingSplitter()
        self._n_thinking_tokens, self._started_at = 0, 0.0
        self._hides_thinking = False  # thinking was hidden, and no content was shown after it
        self._has_thinking_line = False  # the current line of the terminal contains thinking

    def begin(self, opened: ThinkingTags | None) -> None:
        """Start an answer. `opened`: the thinking tags that are open at the end of its prompt, so
        that the answer begins with thinking, or None.
        """
        self._splitter = ThinkingSplitter(opened)
        self._markdown = MarkdownStream(self._renderer) if self._renderer else None
        if self._wrapper:
            self._wrapper.reset()
        self._n_thinking_tokens, self._started_at, self._hides_thinking, self._has_thinking_line = (
            0,
            0.0,
            False,
            False,
        )

    @property
    def is_passthrough(self) -> bool:
        """Whether all further text of this answer would be returned unchanged, so that feed() need
        not be called any more.
        """
        return not (
            self._wrapper
            or self._markdown
            or self._hides_thinking
            or not self._splitter.is_replying
        )

    def feed(self, text: str) -> str:
        """Return the formatted text that can be displayed after one more token, whose text is
        `text`. Must be called for empty texts, too, because calls are counted as tokens.
        """
        if not self._started_at:
            self._started_at = time.perf_counter()
        self._n_thinking_tokens += not self._splitter.is_replying
        return self._format_pieces(self._splitter.feed(text))

    def finish(self) -> str:
        """End the answer. Return the text that feed() has kept back until now. If the answer ended
        while thinking, this includes the end of the line that replaces the thinking.
        """
        text = self._format_pieces(self._splitter.finish())
        if self._hides_thinking and not self._splitter.is_replying:
            text += self._wrap(self._end_fold_line())
        text += self._wrapper.finish() if self._wrapper else ""
        return text + (self._separate(self._markdown.finish()) if self._markdown else "")

    def _format_pieces(self, pieces: list[ThinkingPiece]) -> str:
        """Return the formatted text of pieces that are thinking or content."""
        return "".join(
            self._wrap(self._format_thinking(piece.text))
            if piece.is_thinking
            else self._format_content(piece.text)
            for piece in pieces
        )

    def _wrap(self, text: str) -> str:
        """Return text for the terminal with line breaks between words."""
        return self._wrapper.feed(text) if self._wrapper else text

    def _format_thinking(self, text: str) -> str:
        """Return what to display for a piece of thinking."""
        if self._thinking == SHOW:
            self._has_thinking_line = True
            return dim(escape_controls(text)) if self._color else escape_controls(text)
        is_first, self._hides_thinking = not self._hides_thinking, True
        if self._thinking == HIDE:
            return ""
        text = self._dim("(thinking") if is_first else ""
        return text + (self._end_fold_line() if self._splitter.is_replying else "")

    def _end_fold_line(self) -> str:
        """Return the end of the line that replaces folded thinking. Empty if thinking is not
        folded.
        """
        if self._thinking != FOLD:
            return ""
        seconds = time.perf_counter() - self._started_at
        return (
            self._dim(f" for {self._n_thinking_tokens} tokens, {seconds:.1f} s: /think shows it)")
            + "\n"
        )

    def _format_content(self, text: str) -> str:
        """Return what to display for a piece of content. White space after hidden thinking is
        dropped.
        """
        if self._hides_thinking:
            text = text.lstrip()
            self._hides_thinking = not text
        if self._markdown is None:
            return self._wrap(escape_controls(text))
        output = self._separate(self._markdown.feed(text))
        if output and self._wrapper:
            output = self._wrapper.finish() + output  # rendered text begins and ends a line
        return output

    def _separate(self, text: str) -> str:
        """Return rendered Markdown with a blank line before it if thinking was displayed before.
        (Rendering drops the blank lines that the model wrote there.)
        """
        if text and self._has_thinking_line:
            self._has_thinking_line, text = False, f"\n\n{text}"
        return text

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{RESET}" if self._color else text


def open_formatter(
    display: DisplaySettings, ui: UI, moves_cursor: bool = True
) -> AnswerFormatter | None:
    """Return a formatter for answers that are written to stdout, according to the settings and
    whether stdout is a terminal. Return None if no text needs formatting. `moves_cursor`: whether a
    terminal understands escape sequences that move the cursor.
    """
    terminal = sys.stdout.isatty() and not ui.json
    thinking = HIDE if display.thinking == FOLD and not terminal else display.thinking
    renderer = ui if display.markdown and terminal else None
    if thinking == SHOW and not terminal:
        return None
    wrapper = WordWrapper(lambda: terminal_columns(sys.stdout), moves_cursor) if terminal else None
    if renderer:
        renderer.markdown("")  # loads the Markdown library now, so that it does not delay an answer
    return AnswerFormatter(thinking, terminal and ui.color, renderer, wrapper)
